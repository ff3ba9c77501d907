"use strict";
// The ops of a table as boxes in their modules: modules fold, a column gives the colours, and a click on an op shows its
// row.  A module has the colour of its worst op.  The page lays the boxes out; edges are drawn between those that one
// sees, and end at a folded module where it holds the op.

const GOOD = 40, BAD = 10; // dB
const FIRST = 40; // boxes: modules are unfolded at first, level by level, while there are no more

class Graph {
  constructor(data, table, place) {
    Object.assign(this, { data, table, open: new Set([data.modules]) });
    this.boxes = element("div", { class: "boxes" });
    this.choices = table.data.columns.filter(column => column.number && !["handle", "site"].includes(column.key) && column.values.some(value => Number.isFinite(numeric(value))));
    this.select = element("select", { "aria-label": "coloured by" }, ...this.choices.map(column => new Option(column.title || column.key, column.key, false, column.key === table.data.by)));
    const button = (text, open) => {
      const made = element("button", { type: "button" }, text);
      made.addEventListener("click", () => this.fold(open));
      return made;
    };
    const controls = element("div", { class: "controls" }, element("label", {}, "coloured by ", this.select), button("unfold all", true), button("fold all", false));
    const drawing = element("div", { class: "drawing" }, this.boxes);
    const whole = element("details", {}, element("summary", {}, "Graph of modules"), controls, drawing);
    place.append(whole);
    this.select.addEventListener("change", () => this.draw());
    this.boxes.addEventListener("click", event => this.clicked(event));
    for (const [type, near] of [["mouseover", true], ["mouseout", false]]) this.boxes.addEventListener(type, event => this.mark(event.target.closest("button"), near));
    this.rows(data.modules);
    this.unfoldFirst();
    whole.addEventListener("toggle", () => {
      this.draw();
      drawing.scrollLeft = (drawing.scrollWidth - drawing.clientWidth) / 2;
    }, { once: true });
    new ResizeObserver(() => this.drawEdges()).observe(this.boxes);
  }

  parts(module) {
    return module.layers.flat();
  }

  rows(part) {
    if (part.layers) part.rows = this.parts(part).flatMap(each => this.rows(each));
    return part.rows;
  }

  unfoldFirst() {
    let level = this.parts(this.data.modules), seen = level.length;
    while ((level = level.filter(part => part.layers)).length) {
      seen += level.reduce((count, module) => count + this.parts(module).length, 0);
      if (seen > FIRST) return;
      level.forEach(module => this.open.add(module));
      level = level.flatMap(module => this.parts(module));
    }
  }

  fold(open, module = this.data.modules) {
    for (const part of this.parts(module).filter(part => part.layers)) {
      if (open) this.open.add(part);
      else this.open.delete(part);
      this.fold(open, part);
    }
    if (module === this.data.modules) this.draw();
  }

  draw() {
    this.by = this.table.column(this.select.value);
    this.values = this.by.values.map(numeric);
    this.range = range(this.values);
    this.shown = [];
    this.boxOf = new Map(); // from a row to the number of the box that one sees of it
    this.svg = shape("svg", {});
    this.boxes.replaceChildren(this.svg, this.layers(this.data.modules));
    this.drawEdges();
  }

  layers(module) {
    return element("div", { class: "layers" }, ...module.layers.map(layer => element("div", { class: "layer" }, ...layer.map(part => this.part(part)))));
  }

  part(part) {
    const number = this.shown.length, box = this.box(part);
    if (part.layers && this.open.has(part)) return element("div", { class: "module" }, box, this.layers(part));
    part.rows.forEach(row => this.boxOf.set(row, number));
    return box;
  }

  worst(rows) {
    const known = rows.filter(row => !Number.isNaN(this.values[row]));
    const better = this.by.worse === "smaller" ? (a, b) => this.values[a] > this.values[b] : (a, b) => this.values[a] < this.values[b];
    return known.reduce((worst, row) => (better(worst, row) ? row : worst), known[0]);
  }

  // From 0, the worst, to 1; colours of dB are the same in every report.
  goodness(value) {
    const [low, high] = this.by.low === null ? this.range : [BAD, GOOD];
    const at = Math.max(0, Math.min(1, (value - low) / (high - low || 1)));
    return this.by.worse === "smaller" ? at : 1 - at;
  }

  box(part) {
    const row = this.worst(part.rows), first = part.rows[0];
    const swatch = element("i");
    if (row !== undefined) swatch.style.background = `hsl(${Math.round(130 * this.goodness(this.values[row]))} 65% 50%)`;
    const text = row === undefined ? "–" : textOf(this.by, row);
    const said = [textOf(this.table.column("name"), row === undefined ? first : row), row === undefined && this.table.reason(this.by, first)];
    const made = element("button", { type: "button", "data-box": this.shown.length, title: said.filter(Boolean).join("\n"), ...(part.layers && { "aria-expanded": this.open.has(part) }) },
      swatch, element("span", { class: "value" }, text), element("span", { class: "label" }, part.layers ? `${this.open.has(part) ? "▾" : "▸"} ${part.label}` : part.label), ...(part.layers ? [element("span", { class: "count" }, `${part.rows.length} rows`)] : []));
    this.shown.push(part);
    return made;
  }

  clicked(event) {
    const button = event.target.closest("button");
    if (!button) return;
    const part = this.shown[button.dataset.box];
    if (!part.layers) return this.table.reveal(this.worst(part.rows) ?? part.rows[0]);
    if (!this.open.delete(part)) this.open.add(part);
    this.draw();
    this.boxes.querySelector(`[data-box="${this.shown.indexOf(part)}"]`).focus();
  }

  // One path between two boxes, however many values go that way.
  drawEdges() {
    if (!this.svg || !this.boxes.clientWidth) return;
    const origin = this.boxes.getBoundingClientRect();
    const places = [...this.boxes.querySelectorAll("button")].map(box => ({ box: box.getBoundingClientRect(), head: box.getAttribute("aria-expanded") === "true" }));
    const seen = new Map(this.data.edges.map(edge => edge.map(row => this.boxOf.get(row))).filter(([from, to]) => from !== to).map(edge => [edge.join(), edge]));
    this.svg.replaceChildren(this.arrow(), ...[...seen.values()].map(([from, to], index) =>
      shape("path", { class: "edge", d: route(places, from, to, 16 + 6 * (index % 4), origin), "marker-end": "url(#arrow)", "data-from": from, "data-to": to })));
  }

  arrow() {
    const made = shape("marker", { id: "arrow", viewBox: "0 0 8 8", refX: 7, refY: 4, markerWidth: 6, markerHeight: 6, orient: "auto-start-reverse" });
    made.append(shape("path", { d: "M0 0L8 4L0 8z", fill: "context-stroke" }));
    return made;
  }

  mark(button, near) {
    if (button && this.svg) this.svg.querySelectorAll(`[data-from="${button.dataset.box}"], [data-to="${button.dataset.box}"]`).forEach(edge => edge.classList.toggle("near", near));
  }
}

// Down from one box to another; if boxes are in between, beside them, on the side where that is shorter.  Heads of
// modules are passed too, but do not stop a way straight down.
function route(places, source, target, lane, origin) {
  const from = places[source].box, to = places[target].box;
  const x = at => (at - origin.left).toFixed(1), y = at => (at - origin.top).toFixed(1);
  const start = (from.left + from.right) / 2, end = (to.left + to.right) / 2;
  const hits = (box, left, right) => box.left < right + 4 && box.right > left - 4;
  const between = places.filter(({ box }, number) => number !== source && number !== target && box.bottom > Math.min(from.top, to.top) && box.top < Math.max(from.bottom, to.bottom));
  const stops = ({ box, head }) => !head && box.top >= from.bottom && box.bottom <= to.top && hits(box, Math.min(start, end), Math.max(start, end));
  if (to.top > from.bottom && !between.some(stops)) {
    const middle = (from.bottom + to.top) / 2;
    return `M${x(start)} ${y(from.bottom)}C${x(start)} ${y(middle)} ${x(end)} ${y(middle)} ${x(end)} ${y(to.top)}`;
  }
  const beside = (at, past) => {
    for (let hit; (hit = between.find(({ box }) => hits(box, at, at))); ) at = past(hit.box);
    return at;
  };
  const left = beside(Math.min(from.left, to.left) - lane, box => box.left - lane);
  const right = beside(Math.max(from.right, to.right) + lane, box => box.right + lane);
  const onRight = right - Math.max(start, end) <= Math.min(start, end) - left;
  const [side, a, b] = onRight ? [right, from.right, to.right] : [left, from.left, to.left];
  const p = (from.top + from.bottom) / 2, q = (to.top + to.bottom) / 2, turn = Math.sign(q - p) * Math.min(14, Math.abs(q - p) / 2);
  // Where another box is beside it, an edge leaves a box below, and reaches it above.
  const shut = (number, at, out) => places.some(({ box }, other) => other !== number && box.top < at && box.bottom > at && hits(box, Math.min(out, side) + 8, Math.max(out, side) - 8));
  const leave = shut(source, p, a) ? `M${x(start)} ${y(from.bottom)}v10H${x(side)}` : `M${x(a)} ${y(p)}Q${x(side)} ${y(p)} ${x(side)} ${y(p + turn)}`;
  return leave + (shut(target, q, b) ? `V${y(to.top - 12)}H${x(end)}v12` : `V${y(q - turn)}Q${x(side)} ${y(q)} ${x(b)} ${y(q)}`);
}
