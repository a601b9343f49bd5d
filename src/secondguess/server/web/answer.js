// One answer as it comes: its text by whoever guessed it, its draft trees, and how fast it goes.

import { chatEvents } from "./api.js";

export class Answer {
  pieces = [];
  cycles = [];
  numTokens = 0;
  finish = null; // why it ended
  seed = null;
  #first = null; // when the first token was there
  #last = null;

  constructor(method) {
    this.method = method;
  }

  // Asks for it, and says what each event brought: the pieces of text that are new.
  async receive(request, signal, hear) {
    try {
      for await (const event of chatEvents(request, signal)) hear(this.take(event, performance.now()));
    } catch (error) {
      if (!signal.aborted) throw error;
      this.finish = "stopped";
    }
  }

  take(event, now) {
    this.finish = event.choices[0]?.finish_reason ?? this.finish;
    this.seed = event.metrics?.seed ?? this.seed;
    if (!event.drafting) return [];
    this.numTokens = event.usage.completion_tokens;
    this.#last = { at: now, numTokens: this.numTokens };
    this.#first ??= this.#last;
    this.cycles.push(...event.drafting.cycles);
    this.pieces.push(...event.drafting.pieces);
    return event.drafting.pieces;
  }

  get text() {
    return this.pieces.map((piece) => piece.text).join("");
  }

  // tau: tokens per cycle, the one that the model adds itself among them. Null before the first cycle.
  get tau() {
    const emitted = this.cycles.reduce((sum, cycle) => sum + cycle.path.length, 0);
    return this.cycles.length ? emitted / this.cycles.length : null;
  }

  // Tokens per second since the first one, as they arrived here. Null before the second.
  get pace() {
    const seconds = (this.#last?.at - this.#first?.at) / 1000;
    return seconds > 0 ? (this.#last.numTokens - this.#first.numTokens) / seconds : null;
  }
}

export function fixed(number, digits) {
  return number === null ? "-" : number.toFixed(digits);
}

// What is said under an answer.
export function figures(answer) {
  const parts = [
    `${answer.numTokens} tokens`,
    `${fixed(answer.tau, 2)} per cycle`,
    `${fixed(answer.pace, 1)} per second`,
  ];
  const ends = { length: "stopped at the token limit", stopped: "stopped" };
  if (answer.finish in ends) parts.push(ends[answer.finish]);
  return parts.join(", ");
}
