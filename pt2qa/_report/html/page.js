"use strict";
// Puts tables and charts into their sections, and follows the address: report.html#sort=sqnr&filter=conv&theme=dark
// and order=desc, all=1, table=<report>.<field>, such as report-2.rows, and row=<name or number> to open a row. Without
// table, it is the first one with that column and, if it is to be filtered, with a filter. What one does is written there.

const tables = {};

function followAddress() {
  const wanted = new URLSearchParams(location.hash.slice(1));
  if (wanted.has("theme")) useTheme((chosen = wanted.get("theme")));
  const sort = wanted.get("sort") || "", row = wanted.get("row");
  const fits = table => (["", "worst", "graph"].includes(sort) || table.column(sort)) && !(wanted.has("filter") && table.search.hidden);
  const table = tables[wanted.get("table")] || Object.values(tables).find(fits);
  if (!table || !["sort", "filter", "all", "row"].some(key => wanted.has(key))) return;
  if (wanted.has("sort") || wanted.has("filter") || wanted.has("all"))
    table.show({ sort, descending: wanted.get("order") === "desc", filter: wanted.get("filter") || "", all: wanted.get("all") === "1" });
  if (row !== null && table.numbered(row) !== undefined) table.reveal(table.numbered(row));
}

function writeAddress(table, row) {
  const { sort, descending, filter, all } = table.state;
  const parts = { table: Object.keys(tables).find(key => tables[key] === table), sort, order: descending && "desc", filter, all: all && "1", row, theme: chosen };
  const address = new URLSearchParams(Object.entries(parts).filter(([, value]) => value));
  history.replaceState(null, "", `#${address}`);
}

function drawAll(sections) {
  for (const [id, { tables: given, charts, graph, ...said }] of Object.entries(sections)) {
    const place = document.getElementById(id);
    const ofRows = charts.filter(chart => chart.row !== undefined);
    const drawn = given.map(table => new Table(table, ofRows.filter(chart => chart.table === table.name), place.querySelector(".tables"), said));
    drawn.forEach(table => (tables[`${id}.${table.data.name}`] = table));
    const whole = charts.filter(chart => chart.whole ?? chart.row === undefined), histogram = chart => chart.kind === "histogram";
    Chart.all(whole.filter(chart => !histogram(chart)), drawn, place.querySelector(".charts"));
    Chart.all(whole.filter(histogram), drawn, place.querySelector(".histograms"));
    if (graph) {
      const rows = drawn.find(table => table.data.name === "rows");
      new Graph(graph, rows, place.querySelector(".graph"));
      rows.reads = index => graph.edges.filter(([, to]) => to === index).map(([from]) => from);
    }
  }
  Object.values(tables).forEach(table => (table.elsewhere = index => ofTheSameOp(table, index)));
  document.querySelectorAll(".copied").forEach(addCopyButton);
  addEventListener("hashchange", followAddress);
  followAddress();
  Object.values(tables).forEach(table => (table.changed = row => writeAddress(table, row)));
  document.documentElement.dataset.ready = "true";
}

// The rows of other tables of the model that are about the op of a row: what else was measured there, and what edits did.
function ofTheSameOp(table, index) {
  const wanted = table.column("name") && textOf(table.column("name"), index);
  if (!wanted) return [];
  const about = (other, row) => ["name", "ops", "others"].some(key => other.column(key) && `, ${textOf(other.column(key), row)}, `.includes(`, ${wanted}, `));
  const others = Object.values(tables).filter(other => other !== table && other.model === table.model);
  return others.flatMap(other => [...Array(other.data.size).keys()].filter(row => about(other, row)).map(row => [other, row]));
}

function addCopyButton(place) {
  const button = element("button", { type: "button" }, "copy");
  button.addEventListener("click", () => {
    const text = place.querySelector("pre");
    getSelection().selectAllChildren(text);
    // A page from a disk may not have navigator.clipboard.
    const done = document.execCommand("copy");
    button.textContent = done ? "copied" : "selected: press Ctrl+C";
    setTimeout(() => (button.textContent = "copy"), 2000);
  });
  place.append(button);
}

async function draw() {
  drawAll(await unpacked());
}

draw().catch(failed);
