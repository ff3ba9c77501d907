// Runs the search of a built site: node search.mjs SITE QUERY..., prints the pages that each query finds, as JSON.
import fs from "node:fs"
import vm from "node:vm"
const [site, ...queries] = process.argv.slice(2)
const folder = site + "/assets/javascripts/workers/"
const worker = fs.readdirSync(folder).find(name => /^search\..*\.js$/.test(name))
const index = JSON.parse(fs.readFileSync(site + "/search/search_index.json"))
const heard = [], waiting = []
// A query that fails finds nothing, and warns: here it ends the program.
const warn = (...said) => { console.error(...said); process.exit(1) }
const context = vm.createContext({ console: { ...console, warn }, URL, setTimeout, location: { href: "http://site/" }, importScripts: () => {} })
context.self = context
context.addEventListener = (kind, hear) => heard.push(hear)
context.postMessage = data => waiting.shift()?.(data)
vm.runInContext(fs.readFileSync(folder + worker, "utf8"), context)
const ask = data => new Promise(done => { waiting.push(done); heard.forEach(hear => hear({ data })) })
await ask({ type: 0, data: { ...index, options: { suggest: false } } })
// Terms with numbers can be mixed up in the index; then each query that begins like one of them fails.
const letters = [..."abcdefghijklmnopqrstuvwxyz"]
for (const first of letters) for (const second of letters) await ask({ type: 2, data: first + second })
const found = {}
for (const query of queries) {
  const { data } = await ask({ type: 2, data: query })
  found[query] = data.items.map(page => page[0].location.split("#")[0])
}
console.log(JSON.stringify(found))
