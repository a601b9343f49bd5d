// What the reader has chosen, and what there is to choose from.

import { byId, make } from "./dom.js";

const TITLES = { ar: "plain decoding", ngram: "prompt lookup", "eagle3.1": "EAGLE-3.1", pr: "PR", "hass+pr": "HASS + PR" };
const ORDER = ["ar", "ngram", "eagle3.1", "pr"]; // others come last
const RACERS = ["ar", "eagle3.1", "pr"];

let methods = {};

export function titleOf(method) {
  return TITLES[method] ?? method.toUpperCase();
}

// Offers what the server offers; its own method is chosen.
export function offer(info) {
  methods = info.methods;
  const own = info.method.split(":")[0];
  byId("model").textContent = info.model;
  byId("max-tokens").max = info.max_model_len;
  const rank = (name) => (ORDER.includes(name) ? ORDER.indexOf(name) : ORDER.length);
  for (const name of Object.keys(methods).sort((a, b) => rank(a) - rank(b))) {
    byId("method").append(new Option(titleOf(name), name, name === own, name === own));
    const box = make("input", { type: "checkbox", value: name });
    box.checked = RACERS.includes(name) || name === own;
    byId("racers").append(make("label", {}, box, titleOf(name)));
  }
}

export function method() {
  return byId("method").value;
}

// The methods that race, plain decoding first if it is among them.
export function racers() {
  return [...byId("racers").querySelectorAll("input:checked")].map((box) => box.value);
}

// The settings as fields of a request that is answered by ``name``.
export function fields(name) {
  const number = (id) => (byId(id).value === "" ? undefined : byId(id).valueAsNumber);
  const most = methods[name].budget; // plain decoding has none
  const budget = most === undefined ? undefined : number("budget");
  return {
    speculation: { method: name, budget },
    temperature: number("temperature") ?? 1, // as the field says where it is empty
    max_tokens: number("max-tokens"),
    seed: number("seed"),
  };
}
