"use strict";
// The ops of a table as boxes in their modules: modules fold, a column gives the colours, and a click on an op shows its
// row.  A module has the colour of its worst op.  The page lays the boxes out; edges are drawn between those that one
// sees, and end at a folded module where it holds the op.

const GOOD = 40, BAD = 10; // dB
const HEADS = 100; // pixels that an edge goes further to pass on the right: the heads of modules are on the left
const FIRST = 40; // boxes: modules are unfolded at first, level by level, while there are no more

class Graph {
  constructor(data, table, place) {
    Object.assign(this, { data, table, open: new Set([data.modules]) });
    this.boxes = element("div", { class: "boxes" });
    this.choices = table.data.columns.filter(column => column.number && column.key !== "handle" && column.values.some(value => Number.isFinite(numeric(value))));
    this.select = element("select", { "aria-label": "coloured by" }, ...this.choices.map(column => new Option(column.title || column.key, column.key, false, column.key === table.data.by)));
    const button = (text, open) => {
      const made = element("button", { type: "button" }, text);
      made.addEventListener("click", () => this.fold(open));
      return made;
    };
    const controls = element("div", { class: "controls" }, element("label", {}, "coloured by ", this.select), button("unfold all", true), button("fold all", false));
    const whole = element("details", {}, element("summary", {}, "Graph of modules"), controls, element("div", { class: "drawing" }, this.boxes));
    place.append(whole);
    this.select.addEventListener("change", () => this.draw());
    this.boxes.addEventListener("click", event => this.clicked(event));
    for (const [type, near] of [["mouseover", true], ["mouseout", false]]) this.boxes.addEventListener(type, event => this.mark(event.target.closest("button"), near));
    this.rows(data.modules);
    this.unfoldFirst();
    whole.addEventListener("toggle", () => whole.open && this.draw(), { once: true });
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
    this.boxOf = new Map(); // from a row to the box that one sees of it
    this.svg = shape("svg", {});
    this.boxes.replaceChildren(this.svg, this.layers(this.data.modules));
    this.drawEdges();
  }

  layers(module) {
    return element("div", { class: "layers" }, ...module.layers.map(layer => element("div", { class: "layer" }, ...layer.map(part => this.part(part)))));
  }

  part(part) {
    const box = this.box(part);
    if (part.layers && this.open.has(part)) return element("div", { class: "module" }, box, this.layers(part));
    part.rows.forEach(row => this.boxOf.set(row, box));
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
    const places = new Map([...new Set(this.boxOf.values())].map(box => [box, box.getBoundingClientRect()]));
    const seen = new Map(this.data.edges.map(([from, to]) => [this.boxOf.get(from), this.boxOf.get(to)]).filter(([from, to]) => from !== to).map(([from, to]) => [`${from.dataset.box} ${to.dataset.box}`, [from, to]]));
    this.svg.replaceChildren(this.arrow(), ...[...seen.values()].map(([from, to], index) =>
      shape("path", { class: "edge", d: this.route(places.get(from), places.get(to), [...places.values()], index, origin), "marker-end": "url(#arrow)", "data-from": from.dataset.box, "data-to": to.dataset.box })));
  }

  arrow() {
    const made = shape("marker", { id: "arrow", viewBox: "0 0 8 8", refX: 7, refY: 4, markerWidth: 6, markerHeight: 6, orient: "auto-start-reverse" });
    made.append(shape("path", { d: "M0 0L8 4L0 8z", fill: "context-stroke" }));
    return made;
  }

  // Down from one box to another; around those in between, on the side where that is shorter.
  route(from, to, places, index, origin) {
    const x = at => (at - origin.left).toFixed(1), y = at => (at - origin.top).toFixed(1);
    const start = (from.left + from.right) / 2, end = (to.left + to.right) / 2;
    const [left, right] = [Math.min(start, end) - 4, Math.max(start, end) + 4];
    const between = places.filter(box => box.top > from.top && box.bottom < to.bottom && box !== to && box.left < right && box.right > left && box.top >= from.bottom && box.bottom <= to.top);
    if (!between.length && to.top > from.bottom) {
      const middle = (from.bottom + to.top) / 2;
      return `M${x(start)} ${y(from.bottom)}C${x(start)} ${y(middle)} ${x(end)} ${y(middle)} ${x(end)} ${y(to.top)}`;
    }
    const lane = 16 + 7 * (index % 4), around = [from, to, ...between];
    const [least, most] = [Math.min(...around.map(box => box.left)) - lane, Math.max(...around.map(box => box.right)) + lane];
    const side = start + end - 2 * least + HEADS < 2 * most - start - end ? least : most;
    const [a, b] = side === least ? [from.left, to.left] : [from.right, to.right];
    const [p, q] = [(from.top + from.bottom) / 2, (to.top + to.bottom) / 2], turn = Math.sign(q - p) * Math.min(14, Math.abs(q - p) / 2);
    return `M${x(a)} ${y(p)}Q${x(side)} ${y(p)} ${x(side)} ${y(p + turn)}V${y(q - turn)}Q${x(side)} ${y(q)} ${x(b)} ${y(q)}`;
  }

  mark(button, near) {
    if (button && this.svg) this.svg.querySelectorAll(`[data-from="${button.dataset.box}"], [data-to="${button.dataset.box}"]`).forEach(edge => edge.classList.toggle("near", near));
  }
}
