"use strict";
// A table's rows as the tree of the model's modules, in graph order: modules fold, a column gives the colours, and a
// click on an op shows its row.  A module has the colour of its worst op.

const GOOD = 40, BAD = 10; // dB

class Graph {
  static fits(table) {
    const { name, size } = table.data;
    return name === "rows" && size > 1 && ["handle", "module", "name"].every(key => table.column(key)) && table.column("module").values.some(Boolean);
  }

  constructor(table, place) {
    this.table = table;
    this.lines = element("div", { class: "lines" });
    this.choices = table.data.columns.filter(column => column.number && column.key !== "handle" && column.values.some(value => Number.isFinite(numeric(value))));
    this.select = element("select", { "aria-label": "coloured by" }, ...this.choices.map(column => new Option(column.title || column.key, column.key, false, column.key === table.data.by)));
    const button = (text, open) => {
      const made = element("button", { type: "button" }, text);
      made.addEventListener("click", () => this.fold(open));
      return made;
    };
    const controls = element("div", { class: "controls" }, element("label", {}, "coloured by ", this.select), button("unfold all", true), button("fold all", false));
    const whole = element("details", {}, element("summary", {}, "Graph of modules"), controls, this.lines);
    place.append(whole);
    whole.addEventListener("toggle", () => whole.open && this.draw(), { once: true });
    this.select.addEventListener("change", () => this.draw());
    this.lines.addEventListener("click", event => this.clicked(event));
    this.root = this.tree();
  }

  tree() {
    const root = { children: new Map(), rows: [], depth: 0, open: true };
    const modules = this.table.column("module"), names = this.table.column("name");
    modules.values.forEach((path, row) => {
      let node = root;
      node.rows.push(row);
      for (const part of path ? path.split(".") : []) {
        if (!node.children.has(part)) node.children.set(part, { label: part, children: new Map(), rows: [], depth: node.depth + 1, open: false });
        node = node.children.get(part);
        node.rows.push(row);
      }
      const name = textOf(names, row);
      node.children.set(`/${row}`, { label: name.slice(name.lastIndexOf("/") + 1), rows: [row], row });
    });
    return root;
  }

  fold(open, node = this.root) {
    for (const child of node.children.values()) {
      if (child.row === undefined) {
        child.open = open;
        this.fold(open, child);
      }
    }
    if (node === this.root) this.draw();
  }

  draw() {
    this.by = this.table.column(this.select.value);
    this.values = this.by.values.map(numeric);
    this.range = range(this.values);
    this.shown = [];
    this.list(this.root, 0);
    this.lines.replaceChildren(...this.shown.map((line, index) => this.line(line, index)));
  }

  // A module with one child is drawn as one line with it.
  list(node, depth) {
    for (let child of node.children.values()) {
      let label = child.label;
      while (child.row === undefined && child.children.size === 1) {
        [child] = child.children.values();
        label += (child.row === undefined ? "." : "/") + child.label;
      }
      this.shown.push({ node: child, label, depth });
      if (child.row === undefined && child.open) this.list(child, depth + 1);
    }
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

  line({ node, label, depth }, index) {
    const row = this.worst(node.rows);
    const module = node.row === undefined;
    const swatch = element("i");
    if (row !== undefined) swatch.style.background = `hsl(${Math.round(130 * this.goodness(this.values[row]))} 65% 50%)`;
    const text = row === undefined ? "–" : textOf(this.by, row);
    const made = element("button", { type: "button", "data-line": index, title: [textOf(this.table.column("name"), row === undefined ? node.rows[0] : row), row === undefined && this.table.reason(this.by, node.rows[0])].filter(Boolean).join("\n"), ...(module && { "aria-expanded": node.open }) },
      swatch, element("span", { class: "value" }, text), element("span", { class: "label" }, module ? `${node.open ? "▾" : "▸"} ${label}` : label), ...(module ? [element("span", { class: "count" }, `${node.rows.length} rows`)] : []));
    made.style.setProperty("--depth", depth);
    return made;
  }

  clicked(event) {
    const button = event.target.closest("button");
    if (!button) return;
    const { node } = this.shown[button.dataset.line];
    if (node.row !== undefined) return this.table.reveal(node.row);
    node.open = !node.open;
    this.draw();
    this.lines.querySelector(`[data-line="${button.dataset.line}"]`).focus();
  }
}
