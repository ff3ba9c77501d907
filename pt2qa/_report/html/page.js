"use strict";
// Puts tables and charts into their sections, and follows the address: report.html#sort=sqnr&filter=conv&theme=dark
// with table=<report>.<field>, such as report-2.rows, where it is not the first table; order=desc; all=1.

const tables = {};

function followAddress() {
  const wanted = new URLSearchParams(location.hash.slice(1));
  if (wanted.has("theme")) useTheme((chosen = wanted.get("theme")));
  const table = tables[wanted.get("table")] || Object.values(tables)[0]; // of the first section that has one
  if (!table || !["sort", "filter", "all"].some(key => wanted.has(key))) return;
  table.show({ sort: wanted.get("sort") || "", descending: wanted.get("order") === "desc", filter: wanted.get("filter") || "", all: wanted.get("all") === "1" });
}

function drawAll(sections) {
  for (const [id, { tables: given, charts, graph }] of Object.entries(sections)) {
    const place = document.getElementById(id);
    const ofRows = charts.filter(chart => chart.row !== undefined);
    const drawn = given.map(table => new Table(table, ofRows.filter(chart => chart.table === table.name), place.querySelector(".tables")));
    drawn.forEach(table => (tables[`${id}.${table.data.name}`] = table));
    const whole = charts.filter(chart => chart.row === undefined), histogram = chart => chart.kind === "histogram";
    Chart.all(whole.filter(chart => !histogram(chart)), drawn, place.querySelector(".charts"));
    Chart.all(whole.filter(histogram), drawn, place.querySelector(".histograms"));
    if (graph) new Graph(graph, drawn.find(table => table.data.name === "rows"), place.querySelector(".graph"));
  }
  document.querySelectorAll(".copied").forEach(addCopyButton);
  addEventListener("hashchange", followAddress);
  followAddress();
  document.documentElement.dataset.ready = "true";
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
