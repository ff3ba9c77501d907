"use strict";
// The page of pt2qa serve: settings of places go to the server, which answers with what the model then gives.

const settings = new Map(); // by the number of a place
const tried = [];
let base = null, running = false, again = false, metric = "";

const known = value => (typeof value === "string" ? value : value === null ? "–" : null);
const decibels = value => known(value) ?? `${value.toFixed(1)} dB`;
const percent = value => known(value) ?? `${(100 * value).toFixed(value && value < 0.1 ? 1 : 0)} %`;
const plain = value => known(value) ?? String(Number(value.toPrecision(5)));
const lowest = found => found.outputs.map(each => each.sqnr).sort((a, b) => (a === null ? -Infinity : numeric(a)) - (b === null ? -Infinity : numeric(b)))[0];

async function ask(what, wanted) {
  const answer = await fetch(what, { method: "POST", headers: { "Content-Type": "application/json" }, body: JSON.stringify(wanted) });
  const found = await answer.json();
  if (!answer.ok) throw new Error(found.error);
  return found;
}

function said(text, bad = false) {
  const status = document.getElementById("status");
  status.textContent = text;
  status.className = bad ? "wrong" : "";
}

// One measurement at a time; what was changed meanwhile is measured next.
async function measure() {
  again = true;
  if (running) return;
  running = true;
  while (again) {
    again = false;
    const wanted = [...settings.values()];
    said("Measuring …");
    document.getElementById("exported").hidden = true;
    try {
      const found = await ask("measure", wanted);
      if (base === null) base = found;
      said(`${found.how[0].toUpperCase()}${found.how.slice(1)} in ${found.seconds.toFixed(2)} s.`);
      show(found);
      remember(wanted, found);
    } catch (error) {
      said(error.message, true);
    }
    document.documentElement.dataset.measured = String(tried.length);
  }
  running = false;
}

function card(title, text, value, before, unit) {
  const change = typeof value === "number" && typeof before === "number" ? value - before : 0;
  const digits = unit === " dB" ? change.toFixed(1) : String(Number(change.toPrecision(3)));
  const told = Number(digits) ? element("b", { class: change > 0 ? "gain" : "loss" }, ` ${change > 0 ? "+" : ""}${digits}${unit}`) : "";
  return element("li", {}, element("span", { class: "subject" }, title), element("p", {}, element("b", {}, text), told));
}

function cards(found) {
  const made = [];
  if (metric) made.push(card(metric, plain(found.value), found.value, base.value, ""));
  found.outputs.forEach((each, i) => made.push(card(`SQNR of ${each.name}`, decibels(each.sqnr), each.sqnr, base.outputs[i].sqnr, " dB")));
  if (found.worst_sample >= 0) made.push(card(`worst sample, ${found.worst_sample}`, decibels(found.worst_sample_sqnr), found.worst_sample_sqnr, base.worst_sample_sqnr, " dB"));
  if (found.labels !== null) made.push(card("samples with the same class", percent(found.labels)));
  made.push(card("MACs in float", percent(found.float_macs)));
  return made;
}

function show(found) {
  document.getElementById("figures").replaceChildren(...cards(found));
}

const told = ({ set, low, high }) => (low === undefined ? set : `${set}: ${low}..${high}`);

function remember(wanted, found) {
  const text = wanted.map(each => `${places[each.place].name}: ${told(each)}`).join("; ") || "as quantized";
  if (tried.includes(text)) return;
  tried.push(text);
  const back = element("button", { type: "button" }, "back to it");
  back.addEventListener("click", () => {
    settings.clear();
    wanted.forEach(each => settings.set(each.place, each));
    drawPlaces();
    measure();
  });
  const cells = [element("td", { class: "text name" }, text), element("td", { class: "n" }, decibels(lowest(found)))];
  if (metric) cells.push(element("td", { class: "n" }, plain(found.value)));
  cells.push(element("td", { class: "n" }, percent(found.float_macs)), element("td", {}, found.how), element("td", {}, back));
  document.getElementById("tried").prepend(element("tr", {}, ...cells));
}

let places = [];

function drawPlaces() {
  const order = places.map((_, number) => number).sort((a, b) => (places[b].noise ?? 0) - (places[a].noise ?? 0));
  document.getElementById("places").replaceChildren(...order.map(placeRow));
}

function placeRow(number) {
  const place = places[number], setting = settings.get(number);
  const select = element("select", { "aria-label": `set ${place.name} to` }, new Option("as quantized", ""), ...Object.keys(place.choices).map(each => new Option(each, each)));
  select.value = setting ? setting.set : "";
  const cell = element("td", { class: "set" }, select);
  select.addEventListener("change", () => {
    const set = select.value;
    settings.delete(number);
    if (set) {
      const [low, high] = (place.choices[set].ends || []).map(end => Number(end.toPrecision(5)));
      settings.set(number, { place: number, set, low, high }); // JSON leaves out what is undefined
    }
    const fresh = placeRow(number);
    cell.parentNode.replaceWith(fresh);
    fresh.querySelector("select").focus();
    measure();
  });
  if (setting && setting.low !== undefined) cell.append(ends(place.choices[setting.set].names, setting));
  const name = element("td", { class: "text name" }, place.name);
  return element("tr", setting ? { class: "changed" } : {}, name, cell, element("td", { class: "n" }, percent(place.noise)), element("td", { class: "n" }, percent(place.macs)));
}

function ends([name, ...others], setting) {
  const inputs = ["low", "high"].map(end => {
    const input = element("input", { type: "number", step: "any", value: setting[end], "aria-label": `${end} end of the range of ${name}` });
    input.addEventListener("change", () => {
      const changed = { ...setting, [end]: Number(input.value) };
      Object.assign(setting, changed);
      settings.set(setting.place, changed);
      measure();
    });
    return input;
  });
  return element("div", { class: "ends" }, inputs[0], " to ", inputs[1], ...(others.length ? [element("small", {}, `also of ${others.join(", ")}`)] : []));
}

async function save() {
  const place = document.getElementById("exported");
  said("Quantizing with the plan and converting …");
  try {
    const { plan, converted } = await ask("plan", [...settings.values()]);
    const link = element("a", { download: "plan.json", href: URL.createObjectURL(new Blob([plan], { type: "application/json" })) }, "plan.json");
    const code = 'pt2qa.quantize(capture, quantizer, batches, overrides=pt2qa.OverridePlan.load("plan.json"))';
    place.replaceChildren(element("p", {}, "Quantized with ", link, " and converted, the graph itself gives:"), element("ul", { class: "verdicts" }, ...cards(converted)), element("pre", {}, code));
    place.hidden = false;
    said("Converted.");
    document.documentElement.dataset.exported = plan;
  } catch (error) {
    said(error.message, true);
  }
}

async function start() {
  ({ places, metric } = await unpacked());
  const titles = ["settings", "lowest SQNR", ...(metric ? [metric] : []), "MACs in float", "how", ""];
  document.getElementById("columns").append(...titles.map((title, i) => element("th", i && title !== "how" ? { class: "n" } : {}, title)));
  document.getElementById("reset").addEventListener("click", () => {
    settings.clear();
    drawPlaces();
    measure();
  });
  document.getElementById("export").addEventListener("click", save);
  drawPlaces();
  await measure();
  document.documentElement.dataset.ready = "true";
}

start().catch(failed);
