// Puts the page together: what the server offers, the views, and the keyboard.

import { serverInfo, useKey } from "./api.js";
import { Chat } from "./chat.js";
import { byId } from "./dom.js";
import { Race } from "./race.js";
import { offer } from "./settings.js";
import { TreeView } from "./treeview.js";
import { turn } from "./turn.js";

function show(view) {
  document.body.dataset.view = view;
  for (const button of document.querySelectorAll("nav button")) {
    button.setAttribute("aria-pressed", String(button.dataset.view === view));
  }
}

// Until the server answers; asks for its key if it wants one.
async function connect() {
  for (;;) {
    try {
      return await serverInfo();
    } catch (error) {
      if (error.status !== 401) throw error;
      useKey(await askForKey());
    }
  }
}

function askForKey() {
  const dialog = byId("key-dialog");
  dialog.addEventListener("cancel", (event) => event.preventDefault());
  dialog.showModal();
  return new Promise((resolve) => {
    dialog.querySelector("form").addEventListener("submit", () => resolve(byId("key").value), { once: true });
  });
}

const isTyping = (element) => element.matches("textarea, select, input:not([type=checkbox])");

// Whether the arrow keys move what the element shows.
const isScrolling = (element) => element.id === "drawing" && element.scrollWidth > element.clientWidth;

function addKeys(view) {
  const steps = { ArrowLeft: () => view.step(-1), ArrowRight: () => view.step(1), p: () => view.toggle() };
  document.addEventListener("keydown", (event) => {
    if (event.ctrlKey || event.metaKey || event.altKey) return;
    if (event.key === "Escape") turn.stop();
    else if (event.key.startsWith("Arrow") && isScrolling(event.target)) return;
    else if (event.key in steps && !isTyping(event.target)) {
      event.preventDefault();
      steps[event.key]();
    }
  });
}

try {
  offer(await connect());
  const view = new TreeView();
  new Chat(view);
  new Race(view);
  for (const button of document.querySelectorAll("nav button")) {
    button.addEventListener("click", () => show(button.dataset.view));
  }
  addKeys(view);
  byId("question").focus();
  document.body.dataset.ready = "";
} catch (error) {
  byId("trouble").textContent = `The server cannot be reached: ${error.message}`;
  byId("trouble").hidden = false;
}
