"use strict";
// Charts as SVG, drawn to the width there is, and anew when that changes.  Numbers come from the section's tables.

const SVG = "http://www.w3.org/2000/svg";
const MARGIN = { left: 52, right: 14, top: 10, bottom: 30 };
const tip = document.getElementById("tip");

function shape(tag, attributes, text) {
  const made = document.createElementNS(SVG, tag);
  for (const [name, value] of Object.entries(attributes)) made.setAttribute(name, value);
  if (text !== undefined) made.textContent = text;
  return made;
}

// A name whose modules keep their numbers and first letters, from the left; what is still too long keeps its end.
function shortened(name, letters) {
  const modules = name.split("."), last = modules.pop();
  for (let i = 0; i < modules.length && name.length > letters; i++) {
    if (!/^\d+$/.test(modules[i])) modules[i] = modules[i][0] || "";
    name = [...modules, last].join(".");
  }
  return name.length > letters ? `…${name.slice(name.length - letters + 1)}` : name;
}

function showTip(event, text) {
  tip.textContent = text;
  tip.hidden = false;
  const { width, height } = tip.getBoundingClientRect();
  tip.style.left = `${Math.max(4, Math.min(event.clientX + 14, innerWidth - width - 8))}px`;
  tip.style.top = `${event.clientY + 18 + height > innerHeight ? event.clientY - height - 12 : event.clientY + 18}px`;
}

// Round numbers between two bounds: 1, 2 or 5 times a power of ten apart.
function ticks(low, high, count) {
  const raw = (high - low) / count || 1;
  const power = 10 ** Math.floor(Math.log10(raw));
  const step = power * [1, 2, 5, 10].find(factor => factor * power >= raw);
  const found = [];
  for (let at = Math.ceil(low / step); at * step <= high + step * 1e-9; at++) found.push(Number((at * step).toPrecision(12)));
  return found;
}

const scale = (low, high, from, to) => value => from + ((value - low) / (high - low || 1)) * (to - from);
const range = values => values.filter(Number.isFinite).reduce(([low, high], value) => [Math.min(low, value), Math.max(high, value)], [Infinity, -Infinity]);

class Chart {
  // Drawn when all are in place: each takes room from the others.
  static all(charts, tables, place) {
    charts.map(chart => new Chart(chart, tables, place)).forEach(chart => chart.draw());
  }

  constructor(data, tables, place) {
    this.data = data;
    this.tables = tables;
    this.svg = shape("svg", { role: "img", "aria-label": data.title });
    const caption = element("figcaption", {}, element("h3", {}, data.title), element("div", { class: "about" }, data.about));
    this.figure = element("figure", { class: data.kind }, caption, this.legend(), this.svg);
    place.append(this.figure);
    this.svg.addEventListener("mousemove", event => this.hover && this.hover(event));
    this.svg.addEventListener("mouseleave", () => this.leave());
    new ResizeObserver(() => this.draw()).observe(this.figure);
  }

  legend() {
    const { kind, series } = this.data;
    const names = { along: () => series.map(([, label]) => label), curve: () => series.map(([, label]) => label), histogram: () => series.map(each => each.side), bars: () => series || [], heat: () => [], samples: () => [] }[kind]();
    if (names.length < 2 && !this.data.grid) return "";
    const entries = names.map((name, i) => element("span", {}, element("i", { class: `s${i}` }), name));
    if (this.data.grid) entries.push(element("span", {}, `grid: ${this.data.grid.dtype}, step ${Number(this.data.grid.scale.toPrecision(4))}`));
    return element("div", { class: "legend" }, ...entries);
  }

  table() {
    return this.tables.find(table => table.data.name === this.data.table);
  }

  leave() {
    tip.hidden = true;
    if (this.cursor) this.cursor.setAttribute("visibility", "hidden");
  }

  draw() {
    const width = Math.max(260, Math.floor(this.figure.clientWidth));
    if (width === this.width) return;
    this.width = width;
    this.svg.replaceChildren();
    this[this.data.kind]();
  }

  size(height) {
    this.height = height;
    this.svg.setAttribute("height", height);
    this.svg.setAttribute("viewBox", `0 0 ${this.width} ${height}`);
  }

  add(tag, attributes, text) {
    return this.svg.appendChild(shape(tag, attributes, text));
  }

  axisY(y, values, text = String) {
    for (const value of values) {
      this.add("line", { class: "grid", x1: MARGIN.left, x2: this.width - MARGIN.right, y1: y(value), y2: y(value) });
      this.add("text", { x: MARGIN.left - 8, y: y(value) + 4, "text-anchor": "end" }, text(value));
    }
  }

  axisX(x, values, title) {
    const bottom = this.height - MARGIN.bottom;
    for (const value of values) this.add("text", { x: x(value), y: bottom + 16, "text-anchor": "middle" }, String(value));
    if (title) this.add("text", { x: (MARGIN.left + this.width - MARGIN.right) / 2, y: this.height - 1, "text-anchor": "middle" }, title);
  }

  // Lines and marks of several series; hovering names the nearest point.
  plot(x, y, series, describe, choose) {
    series.forEach(({ xs, ys, line }, index) => {
      const points = ys.map((value, i) => [x(xs[i]), y(value)]).filter(([, at]) => Number.isFinite(at));
      const colour = `stroke:var(--s${index});fill:none`;
      if (line) this.add("path", { d: "M" + points.map(point => point.map(at => at.toFixed(1)).join(" ")).join("L"), style: `${colour};stroke-width:1.5` });
      const marks = points.map(([a, b]) => `M${a.toFixed(1)} ${b.toFixed(1)}h.01`).join("");
      this.add("path", { d: marks, style: `${colour};stroke-width:${ys.length > 400 ? 3 : 5};stroke-linecap:round` });
    });
    this.cursor = this.add("line", { class: "cursor", y1: MARGIN.top, y2: this.height - MARGIN.bottom, visibility: "hidden" });
    this.add("rect", { x: MARGIN.left, y: 0, width: this.width - MARGIN.left - MARGIN.right, height: this.height, fill: "transparent" });
    const places = series[0].xs.map(x);
    const nearest = event => {
      const at = event.clientX - this.svg.getBoundingClientRect().left;
      return places.reduce((best, place, i) => (Math.abs(place - at) < Math.abs(places[best] - at) ? i : best), 0);
    };
    this.hover = event => {
      const index = nearest(event);
      this.cursor.setAttribute("visibility", "visible");
      this.cursor.setAttribute("x1", places[index]);
      this.cursor.setAttribute("x2", places[index]);
      showTip(event, describe(index));
    };
    this.svg.onclick = event => choose && choose(nearest(event));
  }

  along() {
    this.size(220);
    const table = this.table();
    const name = table.column("name");
    const columns = this.data.series.map(([key]) => table.column(key));
    const all = columns.map(column => column.values.map(numeric));
    const [low, high] = range([0, this.data.line, ...all.flat()]);
    const count = table.data.size;
    const x = scale(0, Math.max(count - 1, 1), MARGIN.left + 4, this.width - MARGIN.right - 4);
    const y = scale(low, high, this.height - MARGIN.bottom, MARGIN.top);
    this.axisY(y, ticks(low, high, 6));
    this.axisX(x, [], this.data.x_title || "layers, in graph order");
    this.add("text", { x: 0, y: MARGIN.top + 4 }, this.data.unit);
    this.add("line", { class: "dash", x1: MARGIN.left, x2: this.width - MARGIN.right, y1: y(this.data.line), y2: y(this.data.line) });
    const xs = [...Array(count).keys()];
    const series = all.map((ys, i) => ({ xs, ys, line: ["sqnr", "deployed_sqnr", "value"].includes(columns[i].key) }));
    const describe = i => [textOf(name, i), ...columns.map((column, s) => `${this.data.series[s][1]}: ${textOf(column, i)} ${this.data.unit}`)].join("\n");
    this.plot(x, y, series, describe, i => table.reveal(i));
  }

  curve() {
    this.size(260);
    const table = this.table();
    const xs = table.column(this.data.x).values.map(value => 100 * numeric(value));
    const columns = this.data.series.map(([key]) => table.column(key));
    const all = columns.map(column => column.values.map(numeric));
    const [left, right] = range(xs);
    const [low, high] = range(all.flat());
    const room = 0.06 * (high - low || 1);
    const x = scale(left, right, MARGIN.left + 6, this.width - MARGIN.right - 6);
    const y = scale(low - room, high + room, this.height - MARGIN.bottom - 6, MARGIN.top);
    this.axisY(y, ticks(low - room, high + room, 5));
    this.axisX(x, ticks(left, right, 6).slice(0, 12), this.data.x_title);
    const series = all.map((ys, i) => ({ xs, ys, line: columns[i].key === "predicted" }));
    const name = table.column("name"), edits = table.column("edits");
    const describe = i => [`${textOf(edits, i)} edits, the last at ${textOf(name, i)}`, `float: ${textOf(table.column(this.data.x), i)} of the MACs`,
      ...columns.map((column, s) => `${this.data.series[s][1]}: ${textOf(column, i)}`)].join("\n");
    this.plot(x, y, series, describe);
  }

  bars() {
    const step = 24, bars = this.data.bars, names = Math.min(0.5 * this.width, 300);
    this.size(bars.length * step + 8);
    const room = 14 + 7 * Math.max(...bars.map(bar => bar.text.length));
    const x = scale(Math.min(0, ...bars.map(bar => bar.value)), Math.max(...bars.map(bar => bar.value), 0), names + 10, this.width - room);
    bars.forEach((bar, i) => {
      const y = 4 + i * step;
      const label = shortened(bar.label, Math.floor(names / 6.8));
      this.add("text", { class: "label", x: names, y: y + 15, "text-anchor": "end" }, label);
      let from = 0;
      (bar.parts || [bar.value]).forEach((part, s) => {
        const [left, right] = [x(from), x((from += part))].sort((a, b) => a - b);
        this.add("rect", { class: "bar", x: left, y: y + 3, width: Math.max(this.data.series ? 0 : 1, right - left), height: step - 8, fill: `var(--s${s})` });
      });
      this.add("text", { x: Math.max(x(bar.value), x(0)) + 6, y: y + 15 }, bar.text);
    });
    this.hover = event => {
      const bar = bars[Math.floor((event.clientY - this.svg.getBoundingClientRect().top - 4) / step)];
      const parts = bar && bar.parts ? bar.parts.map((part, s) => `${this.data.series[s]}: ${Number(part.toPrecision(3))}`) : [];
      if (bar) showTip(event, [bar.label, bar.text, ...parts].join("\n"));
    };
  }

  samples() {
    const { samples } = this.data, rows = Math.max(...samples.map(each => each.lines.length));
    const side = 112, cell = side + (rows ? 44 : 16), high = side + 30 + 16 * rows, across = Math.max(1, Math.floor(this.width / cell)), letters = Math.floor(cell / 7);
    this.size(Math.ceil(samples.length / across) * high);
    samples.forEach(({ label, lines, differs, png, line, text, width, height }, i) => {
      const left = (i % across) * cell, top = Math.floor(i / across) * high, factor = side / Math.max(width, height);
      if (png) this.add("image", { x: left, y: top, width: width * factor, height: height * factor, href: `data:image/png;base64,${png}` });
      if (line) this.add("path", { d: "M" + line.map((value, at) => `${(left + (at * side) / (line.length - 1)).toFixed(1)} ${(top + side * (1 - value)).toFixed(1)}`).join("L"), style: "stroke:var(--s0);fill:none" });
      if (text) text.split(" ").forEach((token, at) => this.add("text", { class: "label", x: left + (at % 3) * 38, y: top + 16 + Math.floor(at / 3) * 18 }, token));
      this.add("text", { x: left, y: top + side + 16 }, label);
      lines.forEach((each, at) => {
        const short = each.length > letters ? each.slice(0, letters - 1) + "…" : each;
        this.add("text", { class: differs && at === 1 ? "differs" : "label", x: left, y: top + side + 32 + 16 * at }, short).append(shape("title", {}, each));
      });
    });
  }

  // Op by block; the lower a number, the darker.
  heat() {
    const { blocks, ops, places } = this.data, step = 17, names = Math.min(0.45 * this.width, 300);
    const table = this.table(), column = table.column(this.data.column), name = table.column("name");
    const value = place => (place === null ? NaN : numeric(column.values[place]));
    const [low, high] = this.data.range;
    const shade = number => Math.max(0.06, scale(low, high, 1, 0.06)(number)), wide = (this.width - names - 8) / blocks.length, letters = Math.floor(names / 6.8);
    this.size(ops.length * step + 20);
    ops.forEach((op, i) => {
      this.add("text", { class: "label", x: names, y: i * step + 13, "text-anchor": "end" }, shortened(op, letters));
      places[i].forEach((place, block) => {
        if (!Number.isFinite(value(place))) return;
        const cell = { class: "cell", x: names + 8 + block * wide, y: i * step + 1, width: Math.max(1, wide - 1), height: step - 1 };
        this.add("rect", { ...cell, "fill-opacity": shade(value(place)).toFixed(3) });
      });
    });
    const every = Math.ceil((8 * Math.max(...blocks.map(block => block.length)) + 6) / wide);
    blocks.forEach((block, i) => {
      if (i % every === 0) this.add("text", { x: names + 8 + (i + 0.5) * wide, y: this.height - 5, "text-anchor": "middle" }, block);
    });
    const under = event => {
      const { left, top } = this.svg.getBoundingClientRect();
      return (places[Math.floor((event.clientY - top) / step)] || [])[Math.floor((event.clientX - left - names - 8) / wide)] ?? null;
    };
    this.hover = event => (under(event) === null ? this.leave() : showTip(event, `${textOf(name, under(event))}\n${textOf(column, under(event))} dB`));
    this.svg.onclick = event => under(event) !== null && table.reveal(under(event));
  }

  histogram() {
    this.size(220);
    const { edges, series, grid } = this.data;
    const first = edges[0], last = edges[edges.length - 1];
    const base = this.height - MARGIN.bottom - 12;
    const most = Math.max(1, ...series.flatMap(each => each.counts));
    const level = value => Math.log10(1 + value);
    const x = scale(first, last, MARGIN.left, this.width - MARGIN.right);
    const y = scale(0, level(most), base, MARGIN.top);
    const powers = [...Array(Math.floor(Math.log10(most)) + 1).keys()].map(power => 10 ** power);
    this.axisY(value => y(level(value)), powers.filter((_, i) => i % Math.ceil(powers.length / 5) === 0), value => value.toLocaleString("en"));
    this.axisX(x, ticks(first, last, 6));
    this.add("text", { x: 0, y: this.height - 1 }, "values in a bin, log");
    series.forEach(({ side, counts }, i) => {
      const steps = counts.map((count, b) => `L${x(edges[b]).toFixed(1)} ${y(level(count)).toFixed(1)}H${x(edges[b + 1]).toFixed(1)}`).join("");
      const fill = side === "reference" ? "var(--fill0)" : "none";
      this.add("path", { d: `M${x(first)} ${base}${steps}V${base}`, style: `fill:${fill};stroke:var(--s${i});stroke-width:1.4` });
    });
    if (grid) this.grid(grid, x, base);
    this.hover = event => {
      const at = first + ((event.clientX - this.svg.getBoundingClientRect().left - MARGIN.left) / (this.width - MARGIN.left - MARGIN.right)) * (last - first);
      const bin = edges.findIndex((edge, i) => edge <= at && at < edges[i + 1]);
      if (bin >= 0) showTip(event, [`${edges[bin].toPrecision(4)} to ${edges[bin + 1].toPrecision(4)}`, ...series.map(each => `${each.side}: ${Math.round(each.counts[bin])}`)].join("\n"));
    };
  }

  // A tick for each integer that values are rounded to, or for every so many where they are too dense to tell apart.
  grid(grid, x, base) {
    const real = integer => (integer - grid.zero_point) * grid.scale;
    const pixels = x(real(1)) - x(real(0));
    const every = 2 ** Math.max(0, Math.ceil(Math.log2(2.5 / pixels)));
    let path = "";
    for (let integer = grid.low; integer <= grid.high; integer += every) path += `M${x(real(integer)).toFixed(1)} ${base + 2}v7`;
    this.add("path", { class: "tick", d: path });
    for (const limit of [grid.low, grid.high]) {
      this.add("line", { class: "dash", x1: x(real(limit)), x2: x(real(limit)), y1: MARGIN.top, y2: base + 10 });
      this.add("text", { x: x(real(limit)) + (limit === grid.low ? 4 : -4), y: MARGIN.top + 8, "text-anchor": limit === grid.low ? "start" : "end" }, String(limit));
    }
  }
}
