"use strict";
// Tables that sort by a click on a column's title and filter by words and limits; a click on a row, or Enter, shows all
// of it, and arrows go from row to row.
// Rows are drawn in portions as one scrolls, so that ten thousand of them cost no more than a hundred; one listener
// serves a whole table.  A table that one sees at a glance has no filter.

const PORTION = 200;
const GLANCE = 10;

function element(tag, attributes, ...children) {
  const made = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes || {})) made.setAttribute(name, value);
  made.append(...children);
  return made;
}

// JSON knows neither nan nor infinity: they come as texts.
const SPECIAL = { nan: NaN, inf: Infinity, "-inf": -Infinity };
const numeric = value => (typeof value === "string" ? SPECIAL[value] : Number(value));
const textOf = (column, row) => String((column.texts || column.values)[row]);

// "conv sqnr<20": every word must be in some text that one sees of the row, and every limit must hold.
function matcher(columns, seen, query) {
  const tests = query.toLowerCase().split(/\s+/).filter(Boolean).map(word => {
    const limit = /^(.+?)(<=|>=|<|>|=)(-?[\d.e+-]+|inf)$/.exec(word);
    const column = limit && columns.find(each => each.number && each.key.toLowerCase() === limit[1]);
    if (!column) {
      const texts = seen.filter(each => !each.number);
      return row => texts.some(each => textOf(each, row).toLowerCase().includes(word));
    }
    const bound = limit[3] === "inf" ? Infinity : Number(limit[3]);
    const holds = { "<": (a, b) => a < b, ">": (a, b) => a > b, "<=": (a, b) => a <= b, ">=": (a, b) => a >= b, "=": (a, b) => a === b };
    return row => holds[limit[2]](numeric(column.values[row]), bound);
  });
  return row => tests.every(test => test(row));
}

// Rows without a number come last, whichever way the others go.
function comparer(column, descending) {
  const sign = descending ? -1 : 1;
  if (!column.number) return (a, b) => sign * textOf(column, a).localeCompare(textOf(column, b));
  const values = column.values.map(numeric);
  return (a, b) => {
    const missing = Number.isNaN(values[a]) - Number.isNaN(values[b]);
    if (missing) return missing;
    return values[a] === values[b] ? 0 : values[a] < values[b] ? -sign : sign;
  };
}

class Table {
  // charts: those of single rows, drawn where the row is shown.
  // said: the heading of its report, the model, and what stands in a row where no row has a chart.
  constructor(data, charts, place, said) {
    Object.assign(this, { data, charts, ...said, reads: () => [], elsewhere: () => [] });
    this.changed = () => {};
    this.state = { sort: data.worst ? "worst" : "graph", descending: false, filter: "", all: false };
    this.search = element("input", { type: "search", placeholder: "filter: conv sqnr<20", "aria-label": `filter ${data.title || "rows"}` });
    this.search.hidden = data.size <= GLANCE;
    this.count = element("span", { class: "count" });
    this.head = element("thead");
    this.body = element("tbody");
    this.scroll = element("div", { class: "scroll" }, element("table", {}, this.head, this.body));
    const controls = element("div", { class: "controls" });
    if (data.title) controls.append(element("h3", {}, data.title));
    controls.append(this.search, this.count);
    if (data.worst) {
      this.order = element("select", { "aria-label": "order" }, new Option("worst first", "worst"), new Option("graph order", "graph"), new Option("by column", ""));
      this.order.addEventListener("change", () => this.show({ sort: this.order.value || this.columns[0].key, descending: false }));
      controls.append(this.order);
    }
    if (data.columns.some(column => !column.shown)) {
      this.more = element("input", { type: "checkbox" });
      this.more.addEventListener("change", () => this.show({ all: this.more.checked }));
      controls.append(element("label", {}, this.more, " all columns"));
    }
    place.append(controls, this.scroll);
    this.search.addEventListener("input", () => this.show({ filter: this.search.value }));
    this.head.addEventListener("click", event => this.clicked(event));
    this.body.addEventListener("click", event => this.opened(event));
    this.body.addEventListener("keydown", event => this.pressed(event));
    this.scroll.addEventListener("scroll", () => this.fill());
    this.show({});
  }

  clicked(event) {
    const title = event.target.closest("th");
    if (!title) return;
    const { key } = title.dataset, again = this.state.sort === key;
    this.show({ sort: key, descending: again && !this.state.descending });
    [...this.head.querySelectorAll("th")].find(each => each.dataset.key === key).firstChild.focus(); // it was drawn anew
  }

  column(key) {
    return this.data.columns.find(column => column.key === key);
  }

  show(change) {
    Object.assign(this.state, change);
    const { sort, descending, filter, all } = this.state;
    this.search.value = filter;
    const by = this.column(sort);
    this.columns = this.data.columns.filter(column => all || column.shown || column === by);
    this.rows = (sort === "worst" && this.data.worst ? this.data.worst : [...Array(this.data.size).keys()]).filter(matcher(this.data.columns, this.columns, filter));
    if (by) this.rows.sort(comparer(by, descending));
    if (this.order) this.order.value = by ? "" : sort || "graph";
    this.head.replaceChildren(element("tr", {}, ...this.columns.map(column => this.title(column))));
    this.body.replaceChildren();
    this.scroll.scrollTop = 0;
    this.drawn = 0;
    this.fill();
    this.count.textContent = `${filter ? `${this.rows.length} of ` : ""}${this.data.size} ${this.data.size === 1 ? "row" : "rows"}`;
    this.changed();
  }

  title(column) {
    const title = element("th", { "data-key": column.key, title: [column.key, column.about].filter(Boolean).join(": "), ...(column.number && { class: "n" }) },
      element("button", { type: "button" }, column.title || column.key));
    const { sort, descending } = this.state;
    if (column.key === sort) title.setAttribute("aria-sort", descending ? "descending" : "ascending");
    if (sort === "worst" && column.key === this.data.by) title.setAttribute("aria-sort", column.worse === "larger" ? "descending" : "ascending");
    return title;
  }

  fill() {
    const nearEnd = () => this.scroll.scrollTop + 2 * this.scroll.clientHeight >= this.scroll.scrollHeight;
    while (this.drawn < this.rows.length && (this.drawn === 0 || nearEnd())) this.portion();
  }

  portion() {
    const portion = this.rows.slice(this.drawn, this.drawn + PORTION);
    const first = this.drawn === 0 ? portion[0] : -1; // Tab stops there
    this.body.append(...portion.map(row => element("tr", { "data-row": row, tabindex: row === first ? 0 : -1 }, ...this.columns.map(column => this.cell(column, row)))));
    this.drawn += portion.length;
  }

  cell(column, row) {
    if (!column.number) return element("td", { class: column.key === "name" ? "text name" : "text" }, textOf(column, row));
    const value = numeric(column.values[row]);
    if (Number.isNaN(value)) return element("td", { class: "n none", title: this.reason(column, row) }, "–");
    return element("td", { class: `n${column.low !== null && value < column.low ? " low" : ""}` }, textOf(column, row));
  }

  // Why a cell has no number: what the row says of itself, and what the column means.
  reason(column, row) {
    const note = this.column("note"), said = note && textOf(note, row);
    return ["no number", said && `note: ${said}`, column.about && `${column.key}: ${column.about}`].filter(Boolean).join("\n");
  }

  opened(event) {
    const row = event.target.closest("tr[data-row]");
    if (row && getSelection().isCollapsed) this.toggle(row);
  }

  pressed(event) {
    const rows = [...this.body.querySelectorAll("tr[data-row]")], at = rows.indexOf(event.target);
    const step = { ArrowDown: 1, ArrowUp: -1 }[event.key];
    if (at < 0 || !(step || event.key === "Enter")) return;
    event.preventDefault();
    if (!step) this.toggle(event.target);
    else if (rows[at + step]) rows[at + step].focus();
  }

  // What the address calls a row: its name or, of a second one of that name, its number.
  named(index) {
    const name = this.column("name");
    return name && name.values.indexOf(name.values[index]) === index ? textOf(name, index) : String(index);
  }

  numbered(called) {
    return [...Array(this.data.size).keys()].find(index => this.named(index) === called);
  }

  toggle(row) {
    const after = row.nextElementSibling;
    if (after && after.className === "detail") return after.remove(), this.changed();
    const index = Number(row.dataset.row);
    const place = element("div", { class: "charts" });
    const said = this.data.columns.filter(column => textOf(column, index) !== "");
    const facts = said.map(column => element("div", {}, element("dt", { title: column.about }, column.key), element("dd", {}, ...this.cell(column, index).childNodes)));
    const others = this.elsewhere(index).map(([table, other]) => table.line(other));
    const hint = this.chartless && !this.charts.length ? [element("p", { class: "about" }, this.chartless)] : [];
    row.after(element("tr", { class: "detail" }, element("td", { colspan: this.columns.length }, place, ...hint, element("dl", {}, ...facts), element("ul", { class: "elsewhere" }, ...others))));
    const chartsOf = number => this.charts.filter(chart => chart.row === number);
    const inputs = this.reads(index).flatMap(chartsOf).map(chart => ({ ...chart, title: `input ${chart.title}` }));
    Chart.all([...inputs, ...chartsOf(index)], [this], place);
    this.changed(this.named(index));
  }

  // A row in a line, which leads to it.
  line(index) {
    const link = element("a", { href: "#" }, [this.heading, this.data.title].filter(Boolean).join(", "));
    link.addEventListener("click", event => (event.preventDefault(), this.reveal(index)));
    const said = this.data.columns.filter(column => column.shown && !["name", "module", "op"].includes(column.key) && !["", "nan"].includes(textOf(column, index)));
    return element("li", {}, link, `: ${said.map(column => `${(column.title || column.key).replace(/\s+/g, " ")} ${textOf(column, index)}`).join(", ")}`);
  }

  // Brings a row into view, with all of it.
  reveal(index) {
    if (!this.rows.includes(index)) this.show({ filter: "" });
    while (this.drawn <= this.rows.indexOf(index)) this.portion();
    const row = this.body.querySelector(`tr[data-row="${index}"]`);
    if (!row.nextElementSibling || row.nextElementSibling.className !== "detail") this.toggle(row);
    row.scrollIntoView({ block: "center" });
  }
}
