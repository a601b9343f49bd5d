// The draft trees of one answer: the newest one while it comes, any of them when it is paused or done.

import { fixed } from "./answer.js";
import { byId } from "./dom.js";
import { draw } from "./tree.js";

const STEP_MS = 400; // of a replay

export class TreeView {
  #answer = null;
  #index = 0; // of the cycle that is shown
  #live = false; // whether more cycles come
  #following = false; // whether the newest one is shown
  #replay = null; // a timer
  #drawn = null; // the cycle in the drawing

  constructor() {
    byId("back").addEventListener("click", () => this.step(-1));
    byId("forth").addEventListener("click", () => this.step(1));
    byId("pause").addEventListener("click", () => this.toggle());
    byId("cycle").addEventListener("input", () => this.#go(byId("cycle").valueAsNumber - 1));
  }

  // A new answer begins, and is followed.
  begin(answer) {
    this.#halt();
    [this.#answer, this.#index, this.#live, this.#following, this.#drawn] = [answer, 0, true, true, null];
    this.#show();
  }

  // There is news of an answer.
  update(answer) {
    if (answer !== this.#answer) return;
    if (this.#following) this.#index = Math.max(0, answer.cycles.length - 1);
    requestAnimationFrame(() => this.#show());
  }

  end(answer) {
    if (answer !== this.#answer) return;
    this.#live = this.#following = false;
    this.#show();
  }

  step(by) {
    this.#go(this.#index + by);
  }

  // Pause, or go on: with the newest cycle while an answer comes, else cycle by cycle to the end.
  toggle() {
    if (this.#following || this.#replay) this.#halt();
    else if (this.#live) this.#follow();
    else this.#play();
    this.#show();
  }

  #go(index) {
    this.#halt();
    this.#index = Math.min(Math.max(index, 0), this.#last);
    this.#show();
  }

  #follow() {
    this.#following = true;
    this.#index = this.#last;
  }

  #play() {
    if (this.#last === 0) return;
    if (this.#index >= this.#last) this.#index = 0;
    this.#replay = setInterval(() => {
      this.#index += 1;
      if (this.#index >= this.#last) this.#halt();
      this.#show();
    }, STEP_MS);
  }

  #halt() {
    clearInterval(this.#replay);
    this.#replay = null;
    this.#following = false;
  }

  get #last() {
    return Math.max(0, (this.#answer?.cycles.length ?? 0) - 1);
  }

  #show() {
    if (!this.#answer) return;
    this.#showMeters();
    this.#showPlace();
    const cycle = this.#answer.cycles[this.#index];
    byId("pause").textContent = this.#following || this.#replay ? "Pause" : "Play";
    byId("pause").disabled = byId("cycle").disabled = !cycle;
    if (!cycle || cycle === this.#drawn) return;
    this.#drawn = cycle;
    const said = describe(cycle);
    byId("said").textContent = said;
    byId("drawing").replaceChildren(draw(cycle, this.#answer.method, said));
  }

  #showPlace() {
    const count = this.#answer.cycles.length;
    byId("which").value = count ? `cycle ${this.#index + 1} of ${count}` : "no cycle yet";
    Object.assign(byId("cycle"), { max: Math.max(count, 1), value: this.#index + 1 });
  }

  #showMeters() {
    const { tau, pace } = this.#answer;
    byId("tau").value = fixed(tau, 2);
    byId("pace").value = fixed(pace, 1);
    const [tauMeter, paceMeter] = [byId("tau-meter"), byId("pace-meter")];
    for (const [meter, value] of [[tauMeter, tau ?? 1], [paceMeter, pace ?? 0]]) {
      meter.max = Math.max(meter.max, value); // the best so far fills it
      meter.value = value;
    }
  }
}

function describe(cycle) {
  const guesses = cycle.tokens.length - 1;
  const refined = cycle.levels.filter(Boolean).length;
  const accepted = cycle.path.slice(1).map((node) => JSON.stringify(cycle.tokens[node]));
  const looks = refined ? `, ${refined} of them by the second look` : "";
  const kept = accepted.length ? `accepted ${accepted.join(" ")}` : "none accepted";
  const drafted = guesses ? `${guesses} guesses after ${JSON.stringify(cycle.tokens[0])}${looks}; ${kept}; ` : "No guesses; ";
  return `${drafted}the model added ${JSON.stringify(cycle.bonus)}.`;
}
