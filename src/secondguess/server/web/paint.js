// Text in the colours of whoever guessed it.

import { make } from "./dom.js";

const NAMES = {
  model: "written by the model itself",
  level0: "level 0: guessed by the drafter at first sight",
  refined: "refined: guessed by the drafter's second look",
  lookup: "prompt lookup: followed the same words earlier in the text",
};

// The kind of an origin, which is also its class in the style sheet.
export function kindOf(origin, method) {
  if (origin === "prefill" || origin === "bonus") return "model";
  return method === "ngram" ? "lookup" : origin;
}

export function paint(element, pieces, method) {
  for (const { text, origin } of pieces) {
    const kind = kindOf(origin, method);
    element.append(make("span", { class: kind, title: NAMES[kind] }, text));
  }
}
