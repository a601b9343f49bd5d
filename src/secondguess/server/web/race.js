// One prompt, several methods: measured one after the other, replayed side by side.

import { Answer, figures } from "./answer.js";
import { byId, make, submitOnEnter } from "./dom.js";
import { paint } from "./paint.js";
import { fields, racers, titleOf } from "./settings.js";
import { turn } from "./turn.js";

class Lane {
  #heard = []; // the pieces of text, and when they came: milliseconds after the request
  #shown = 0; // how many of them are shown

  constructor(method, request) {
    [this.answer, this.request] = [new Answer(method), request];
    this.bar = make("progress", { max: request.max_tokens, value: 0, "aria-label": `${titleOf(method)}: tokens` });
    this.note = make("p", { class: "soft" }, "waiting");
    this.text = make("div", { class: "text", tabindex: 0 });
    this.element = make("article", {}, make("h2", {}, titleOf(method)), this.bar, this.note, this.text);
  }

  async run(signal, view) {
    const start = performance.now();
    const hear = (pieces) => {
      this.#heard.push({ after: performance.now() - start, pieces, numTokens: this.answer.numTokens });
      this.advance(Infinity);
      this.note.textContent = figures(this.answer);
      view.update(this.answer);
    };
    view.begin(this.answer);
    try {
      await this.answer.receive(this.request, signal, hear);
      hear([]);
    } catch (error) {
      this.note.textContent = error.message;
    } finally {
      view.end(this.answer);
    }
  }

  rewind() {
    this.text.replaceChildren();
    this.bar.value = this.#shown = 0;
  }

  // Shows what had come after so many milliseconds; returns whether that is all.
  advance(elapsed) {
    for (; this.#shown < this.#heard.length; this.#shown += 1) {
      const { after, pieces, numTokens } = this.#heard[this.#shown];
      if (after > elapsed) return false;
      paint(this.text, pieces, this.answer.method);
      this.bar.value = numTokens;
    }
    this.text.scrollTop = this.text.scrollHeight;
    return true;
  }
}

export class Race {
  #lanes = [];

  constructor(view) {
    this.view = view;
    byId("start").addEventListener("submit", (event) => {
      event.preventDefault();
      this.run(byId("prompt").value);
    });
    submitOnEnter(byId("prompt"));
    byId("halt").addEventListener("click", () => this.stop());
    byId("replay").addEventListener("click", () => this.replay());
    turn.watch(() => this.#showTurn());
  }

  stop() {
    if (turn.isOf(this)) turn.stop();
  }

  async run(prompt) {
    if (turn.taken) return;
    const messages = [{ role: "user", content: prompt }];
    const seed = Math.floor(Math.random() * 2 ** 32);
    this.#lanes = racers().map((name) => {
      const own = fields(name);
      return new Lane(name, { messages, ...own, seed: own.seed ?? seed });
    });
    byId("lanes").replaceChildren(...this.#lanes.map((lane) => lane.element));
    const { signal } = turn.take(this);
    for (const lane of this.#lanes) {
      if (signal.aborted) break;
      await lane.run(signal, this.view);
    }
    turn.pass();
    if (!signal.aborted) this.#compare();
  }

  // Against the first lane, which is plain decoding's if it races.
  #compare() {
    const [first, ...others] = this.#lanes.map((lane) => lane.answer);
    for (const [i, answer] of others.entries()) {
      if (!answer.pace || !first.pace) continue; // one of them failed, or has said hardly anything
      const speedup = (answer.pace / first.pace).toFixed(2);
      const same = answer.text === first.text ? "the same text" : "another text";
      this.#lanes[i + 1].note.append(make("strong", {}, ` ${speedup}x, ${same}`));
    }
  }

  replay() {
    const [lanes, { signal }, start] = [this.#lanes, turn.take(this), performance.now()];
    lanes.forEach((lane) => lane.rewind());
    const frame = (now) => {
      const elapsed = signal.aborted ? Infinity : now - start;
      const all = lanes.map((lane) => lane.advance(elapsed)).every(Boolean);
      if (all) turn.pass();
      else requestAnimationFrame(frame);
    };
    requestAnimationFrame(frame);
  }

  #showTurn() {
    const mine = turn.isOf(this);
    byId("halt").hidden = !mine;
    byId("go").hidden = mine;
    byId("go").disabled = turn.taken;
    byId("replay").disabled = turn.taken || this.#lanes.length === 0;
  }
}
