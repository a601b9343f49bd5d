// A cycle's draft tree as SVG: the root on the left, likelier siblings further up, the accepted path filled.

import { kindOf } from "./paint.js";

const NODE = { width: 92, height: 24 };
const STEP = { x: 112, y: 32 };
const MARGIN = 4;
const LONGEST = 8; // characters of a token that fit

// Where the nodes lie, in steps; the bonus token is a child of the accepted path's last node.
export function layout(cycle) {
  const children = cycle.parents.map(() => []);
  cycle.parents.forEach((parent, node) => parent >= 0 && children[parent].push(node));
  const places = [];
  let bonus = null;
  let row = 0;
  function place(node, x) {
    places[node] = { x, y: row };
    const below = children[node].sort((a, b) => cycle.probabilities[b] - cycle.probabilities[a]);
    below.forEach((child, i) => {
      if (i > 0) row += 1;
      place(child, x + 1);
    });
    if (node !== cycle.path.at(-1)) return;
    if (below.length) row += 1;
    bonus = { x: x + 1, y: row };
  }
  place(0, 0);
  return { places, bonus, columns: 1 + Math.max(bonus.x, ...places.map(({ x }) => x)), rows: row + 1 };
}

export function draw(cycle, method, label) {
  const { places, bonus, columns, rows } = layout(cycle);
  const size = { width: columns * STEP.x - STEP.x + NODE.width + 2 * MARGIN, height: rows * STEP.y };
  const svg = shape("svg", { ...size, viewBox: `0 0 ${size.width} ${size.height}`, role: "img", "aria-label": label });
  const accepted = new Set(cycle.path);
  cycle.parents.forEach((parent, node) => {
    if (parent >= 0) svg.append(link(places[parent], places[node], accepted.has(node)));
  });
  svg.append(link(places[cycle.path.at(-1)], bonus, true));
  cycle.tokens.forEach((token, node) => {
    const kind = node === 0 ? "model" : kindOf(cycle.levels[node] ? "refined" : "level0", method);
    svg.append(box(places[node], token, kind, accepted.has(node), cycle.probabilities[node]));
  });
  svg.append(box(bonus, cycle.bonus, "model", true, null));
  return svg;
}

function link(from, to, accepted) {
  const start = at(from);
  const end = at(to);
  const [x1, y1, x2, y2] = [start.x + NODE.width, start.y + NODE.height / 2, end.x, end.y + NODE.height / 2];
  const middle = (x1 + x2) / 2;
  const d = `M${x1} ${y1}C${middle} ${y1} ${middle} ${y2} ${x2} ${y2}`;
  return shape("path", { class: accepted ? "link accepted" : "link", d });
}

// A token, the drafter's confidence in it as a number and as a bar, and all of it in words for the pointer.
function box(place, token, kind, accepted, probability) {
  const { x, y } = at(place);
  const group = shape("g", { class: `node ${kind}${accepted ? " accepted" : ""}`, transform: `translate(${x} ${y})` });
  group.append(shape("rect", { class: "box", ...NODE, rx: 5 }));
  group.append(shape("text", { x: 6, y: 16 }, shown(token)));
  const words = [JSON.stringify(token), kind];
  if (probability !== null) {
    const percent = Math.round(100 * probability);
    group.append(shape("text", { class: "percent", x: NODE.width - 5, y: 16, "text-anchor": "end" }, `${percent}`));
    group.append(shape("rect", { class: "bar", y: NODE.height - 3, width: NODE.width * probability, height: 3 }));
    words.push(`${percent}% after its parent`);
  }
  if (accepted) words.push("accepted");
  group.append(shape("title", {}, words.join(", ")));
  return group;
}

function at({ x, y }) {
  return { x: MARGIN + x * STEP.x, y: MARGIN + y * STEP.y };
}

// What can be seen of a token: its space, line ends, and no more of it than fits.
export function shown(token) {
  const visible = token.replace(/^ /, "\u00b7").replaceAll("\n", "\u21b5").replaceAll("\t", "\u21e5");
  const characters = [...visible];
  return characters.length > LONGEST ? `${characters.slice(0, LONGEST - 1).join("")}\u2026` : visible;
}

function shape(name, attributes, text) {
  const element = document.createElementNS("http://www.w3.org/2000/svg", name);
  for (const [key, value] of Object.entries(attributes)) element.setAttribute(key, value);
  if (text !== undefined) element.textContent = text;
  return element;
}
