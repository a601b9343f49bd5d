// A conversation.

import { Answer, figures } from "./answer.js";
import { byId, make, submitOnEnter } from "./dom.js";
import { paint } from "./paint.js";
import { fields, method, titleOf } from "./settings.js";
import { turn } from "./turn.js";

export class Chat {
  #messages = [];

  constructor(view) {
    this.view = view;
    byId("ask").addEventListener("submit", (event) => {
      event.preventDefault();
      this.ask(byId("question").value);
    });
    submitOnEnter(byId("question"));
    byId("stop").addEventListener("click", () => this.stop());
    byId("reset").addEventListener("click", () => this.reset());
    turn.watch(() => this.#showTurn());
  }

  stop() {
    if (turn.isOf(this)) turn.stop();
  }

  reset() {
    this.stop();
    this.#messages = [];
    byId("log").replaceChildren(byId("welcome"));
    byId("question").focus();
  }

  async ask(question) {
    if (turn.taken || !question.trim()) return;
    const said = make("article", { class: "user" }, question);
    const [text, note] = [make("div", { class: "text" }), make("small", { class: "soft" })];
    byId("log").append(said, make("article", { class: "assistant" }, text, note));
    byId("question").value = "";
    const { signal } = turn.take(this);
    const messages = this.#messages; // reset() begins another list
    messages.push({ role: "user", content: question });
    try {
      const answer = await this.#receive(messages, signal, text, note);
      messages.push({ role: "assistant", content: answer.text });
    } catch (error) {
      messages.pop();
      byId("question").value ||= question;
      note.replaceWith(make("p", { class: "error", role: "alert" }, error.message));
    } finally {
      turn.pass();
    }
  }

  async #receive(messages, signal, text, note) {
    const answer = new Answer(method());
    const hear = (pieces) => {
      const atEnd = isAtEnd(byId("log"));
      paint(text, pieces, answer.method);
      note.textContent = `${titleOf(answer.method)}: ${figures(answer)}`;
      if (atEnd) byId("log").scrollTop = byId("log").scrollHeight;
      this.view.update(answer);
    };
    this.view.begin(answer);
    try {
      await answer.receive({ messages, ...fields(answer.method) }, signal, hear);
    } finally {
      this.view.end(answer);
    }
    hear([]);
    return answer;
  }

  #showTurn() {
    const mine = turn.isOf(this);
    byId("stop").hidden = !mine;
    byId("send").hidden = mine;
    byId("send").disabled = turn.taken;
    byId("log").setAttribute("aria-busy", String(mine));
    byId("log").scrollTop = byId("log").scrollHeight;
  }
}

// Whether the newest text is in view; whoever has scrolled up is left there.
function isAtEnd(element) {
  return element.scrollHeight - element.scrollTop - element.clientHeight < 40;
}
