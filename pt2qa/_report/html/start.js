"use strict";
// What every page has: light or dark, its data, and what it says where a browser cannot draw it.

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

// The data are JSON, compressed, as base64.
async function unpacked() {
  const text = document.getElementById("data").textContent;
  const bytes = Uint8Array.from(atob(text), letter => letter.charCodeAt(0));
  return new Response(new Blob([bytes]).stream().pipeThrough(new DecompressionStream("gzip"))).json();
}

function failed(error) {
  const place = document.getElementById("failed");
  place.hidden = false;
  place.append(String(error));
  throw error;
}
