"use strict";
// Puts tables and charts into their sections, and follows the address: report.html#sort=sqnr&filter=conv&theme=dark
// with table=<report>.<field>, such as report-2.rows, where it is not the first table; order=desc; all=1.

function useTheme(theme) {
  document.documentElement.dataset.theme = theme;
}

const SYSTEM = matchMedia("(prefers-color-scheme: dark)");
let chosen = "";
const followSystem = () => chosen || useTheme(SYSTEM.matches ? "dark" : "light");
SYSTEM.addEventListener("change", followSystem);
document.getElementById("theme").addEventListener("click", () => {
  chosen = document.documentElement.dataset.theme === "dark" ? "light" : "dark";
  useTheme(chosen);
});
followSystem();

const tables = {};

function followAddress() {
  const wanted = new URLSearchParams(location.hash.slice(1));
  if (wanted.has("theme")) useTheme((chosen = wanted.get("theme")));
  const table = tables[wanted.get("table")] || Object.values(tables)[0];
  if (!table || !["sort", "filter", "all"].some(key => wanted.has(key))) return;
  table.show({ sort: wanted.get("sort") || "", descending: wanted.get("order") === "desc", filter: wanted.get("filter") || "", all: wanted.get("all") === "1" });
}

// The data are JSON, compressed, as base64.
async function unpacked(text) {
  const bytes = Uint8Array.from(atob(text), letter => letter.charCodeAt(0));
  return new Response(new Blob([bytes]).stream().pipeThrough(new DecompressionStream("gzip"))).json();
}

function drawAll(sections) {
  sections.forEach(({ tables: given, charts }, index) => {
    const place = document.getElementById(`report-${index + 1}`);
    const section = { place: name => place.querySelector(name), tables: given.map(table => new Table(table, place.querySelector(".tables"))) };
    section.tables.forEach(table => (tables[`report-${index + 1}.${table.data.name}`] = table));
    charts.forEach(chart => new Chart(chart, section));
  });
  addEventListener("hashchange", followAddress);
  followAddress();
  document.documentElement.dataset.ready = "true";
}

async function draw() {
  drawAll(await unpacked(document.getElementById("data").textContent));
}

draw().catch(error => {
  const failed = document.getElementById("failed");
  failed.hidden = false;
  failed.append(String(error));
  throw error;
});
