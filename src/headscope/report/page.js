// Part two: what is on the screen. One state, and functions that draw from it.

const state = {
  layer: 0,
  head: 0,
  token: IS_IMAGE ? Math.floor(LENGTH / 2 + (data.grid ? data.grid[1] / 2 : 0)) % LENGTH : LENGTH - 1,
  preview: null, // a token that is pointed at
  cell: null, // a cell of the map that is pointed at
  scale: LENGTH > 40 && !IS_IMAGE ? "root" : "linear",
  most: "own",
  thumbs: "received",
  direction: "row",
};

const byId = (id) => document.getElementById(id);

function make(tag, properties = {}, ...children) {
  const node = document.createElement(tag);
  for (const [name, value] of Object.entries(properties)) {
    if (name.includes("-") || name === "role" || name === "for") node.setAttribute(name, value);
    else node[name] = value;
  }
  node.append(...children);
  return node;
}

const DIGITS = data.encoding.bits === 16 ? 3 : 2; // no more than the file holds
const shown = (value) => (Number.isNaN(value) ? "NaN" : value.toFixed(DIGITS));
const rounded = (value, decimals = 2) => (value === null || value === undefined ? "–" : value.toFixed(decimals));
const headName = (layer, head) => `layer ${layer}, head ${head}`;
const tokenNode = (n) => make("span", { className: "token" }, data.labels[n]);
const active = () => (state.preview === null ? state.token : state.preview);

const WEAK = 0.3; // a pattern's score below this says that nothing fits

/** The largest weight on the page, for colours that all heads share. */
let overall = 0;
function largestOfAll() {
  if (!overall) data.heads.forEach((heads, layer) => { for (let h = 0; h < heads; h++) overall = Math.max(overall, maximumOf(layer, h)); });
  return overall;
}

const mostOf = (layer, head) => (state.most === "own" ? maximumOf(layer, head) : largestOfAll());

/** What a head is likest to, in two words: for the thumbnails and the heading. */
function likeness(layer, head) {
  const found = IS_IMAGE ? data.looks[layer][head] : data.patterns[layer][head];
  if (!found) return { name: "–", value: "", weak: true };
  return IS_IMAGE
    ? { name: found[0], value: "× " + found[1].toFixed(1), weak: found[1] < 1.2 }
    : { name: found[0], value: found[1].toFixed(2), weak: found[1] < WEAK };
}

// ---------------------------------------------------------------- controls, legend

function choice(label, key, options) {
  const select = make("select", {}, ...options.map(([value, text]) => make("option", { value }, text)));
  select.value = state[key];
  select.addEventListener("change", () => { state[key] = select.value; drawAll(); });
  return make("label", {}, label, select);
}

function buildControls() {
  if (IS_IMAGE) {
    byId("controls").append(choice("Small pictures", "thumbs", [
      ["received", "mean over all patches"], ["patch", "from the chosen patch"], ["map", "whole map, patch × patch"],
    ]));
  }
  byId("controls").append(
    choice("Scale", "scale", [["linear", "linear"], ["root", "square root"], ["log", "logarithm"]]),
    choice("Full colour at", "most", [["own", "largest of each head"], ["all", "largest of all heads"]]),
  );
}

function drawLegend() {
  const g = byId("bar").getContext("2d");
  for (let n = 0; n < 256; n++) {
    g.fillStyle = css(look.table[n]);
    g.fillRect(n, 0, 1, 1);
  }
  const most = state.most === "own" ? 1 : largestOfAll();
  const unit = state.most === "own" ? " of the head's largest weight" : "";
  const middle = unshade(0.5, most, state.scale);
  const low = state.scale === "log" ? ` ${(most / 1e4).toPrecision(1)} or less` : " 0";
  let text = `${low} … ${middle < 0.01 ? middle.toPrecision(1) : middle.toFixed(2)} … ${most.toFixed(2)}${unit}`;
  if (data.seen !== "all") text += "; grey: may not be seen";
  if (anyBroken) text += "; blue: NaN or infinity";
  if (data.object) text += "; line: outline of the object";
  byId("bar-text").textContent = text;
}

// ---------------------------------------------------------------- the grid

const thumbs = [];

function buildGrid() {
  const grid = byId("grid");
  const widest = Math.max(...data.heads);
  const columns = `1.7rem repeat(${widest}, minmax(30px, 104px))`;
  const names = make("div", { className: "heads names", role: "row" }, make("span", { role: "presentation" }));
  names.style.gridTemplateColumns = columns;
  for (let h = 0; h < widest; h++) names.append(make("span", { className: "name", role: "columnheader", "aria-label": "head " + h }, String(h)));
  grid.append(names);
  for (let layer = 0; layer < LAYERS; layer++) {
    const row = make("div", { className: "heads", role: "row" });
    row.style.gridTemplateColumns = columns;
    row.append(make("span", { className: "name", role: "rowheader", "aria-label": "layer " + layer }, "L" + layer));
    thumbs.push([]);
    for (let head = 0; head < data.heads[layer]; head++) {
      const like = likeness(layer, head);
      const text = `${headName(layer, head)}: ${like.name} ${like.value}`;
      const button = make(
        "button",
        { type: "button", className: "thumb", title: text, "aria-label": text, tabIndex: -1 },
        make("canvas", { "aria-hidden": "true" }),
        make("span", { className: like.weak ? "weak" : "" }, make("b", {}, like.name)),
        make("span", {}, like.value),
      );
      button.addEventListener("click", () => open(layer, head));
      thumbs[layer].push(button);
      row.append(make("div", { role: "gridcell" }, button));
    }
    grid.append(row);
  }
  grid.addEventListener("keydown", moveInGrid);
  byId("grid-hint").textContent = IS_IMAGE
    ? "Under each picture: the region that the head looks at most, and how many times as much as an even spread would."
    : "Under each map: the pattern it matches best, and its score. Each line is a layer.";
}

function moveInGrid(event) {
  const step = { ArrowLeft: [0, -1], ArrowRight: [0, 1], ArrowUp: [-1, 0], ArrowDown: [1, 0] }[event.key];
  if (!step) return;
  event.preventDefault();
  const layer = Math.max(0, Math.min(LAYERS - 1, state.layer + step[0]));
  const head = Math.max(0, Math.min(data.heads[layer] - 1, state.head + step[1]));
  open(layer, head);
  thumbs[layer][head].focus();
}

function drawThumb(layer, head) {
  const canvas = thumbs[layer][head].firstChild;
  const width = Math.round((canvas.clientWidth || 64) * devicePixelRatio);
  const p = weightsOf(layer, head);
  if (IS_IMAGE && state.thumbs !== "map") {
    const values = state.thumbs === "patch" ? p.subarray(state.token * LENGTH, (state.token + 1) * LENGTH) : received(layer, head);
    drawPatches(canvas, values, width, strongest(values, layer, head), state.scale, null);
    return;
  }
  drawMap(canvas, p, Math.min(LENGTH, width), mostOf(layer, head), state.scale);
}

/** The value that takes the full colour, where one value a patch is shown. */
function strongest(values, layer, head) {
  return state.most === "own" ? Math.max(...values.filter((value) => value > 0), 0) || 1 : mostOf(layer, head);
}

function drawGrid() {
  thumbs.forEach((row, layer) => row.forEach((_, head) => drawThumb(layer, head)));
}

function markGrid() {
  thumbs.forEach((row, layer) => row.forEach((button, head) => {
    const here = layer === state.layer && head === state.head;
    button.tabIndex = here ? 0 : -1;
    if (here) button.setAttribute("aria-current", "true");
    else button.removeAttribute("aria-current");
  }));
  for (const row of byId("statistics").tBodies[0].rows) {
    if (Number(row.dataset.layer) === state.layer && Number(row.dataset.head) === state.head) row.setAttribute("aria-current", "true");
    else row.removeAttribute("aria-current");
  }
}

// ---------------------------------------------------------------- one head

function open(layer, head) {
  state.layer = layer;
  state.head = head;
  state.cell = null;
  remember();
  markGrid();
  drawHead();
}

function step(by) {
  let { layer, head } = state;
  head += by;
  if (head < 0) { layer = (layer + LAYERS - 1) % LAYERS; head = data.heads[layer] - 1; }
  else if (head >= data.heads[layer]) { layer = (layer + 1) % LAYERS; head = 0; }
  open(layer, head);
}

function drawHead() {
  const { layer, head } = state;
  byId("one-title").textContent = `Layer ${layer}, head ${head}`;
  const like = data.patterns[layer][head];
  const lead = byId("one-lead");
  lead.replaceChildren();
  if (IS_IMAGE && data.looks[layer][head]) {
    const [name, ratio] = data.looks[layer][head];
    lead.append("Looks most at ", make("b", {}, name), `: ${ratio.toFixed(2)} times as much as an even spread would. `);
  }
  if (like) {
    lead.append(like[1] < WEAK ? "No pattern fits well; the closest: " : "Best match: ", make("b", {}, like[0]), `, score ${like[1].toFixed(2)} of 1 on ${like[2]} rows (${data.patternWords[like[0]]}).`);
  } else lead.append("Too few tokens to tell a pattern.");
  if (IS_IMAGE) drawImageHead();
  else drawTextHead();
  drawFacts();
}

function drawFacts() {
  const facts = byId("facts");
  facts.replaceChildren();
  for (const [name, word] of Object.entries(data.words)) {
    const figures = data.statistics[state.layer][name];
    const figure = figures ? figures[state.head] : null;
    if (figure === null || (name === "mass" && Math.abs(figure - 1) < 1e-3)) continue;
    const rows = data.rows[state.layer][name][state.head];
    facts.append(make("div", { title: `${word.meaning} On ${rows} rows.` }, make("dt", {}, word.heading), make("dd", {}, rounded(figure, word.decimals))));
  }
}

/** The largest entries of a row or a column, as a list with bars. */
function ranks(list, values, allowed) {
  const order = [...values.keys()].filter((n) => allowed(n)).sort((a, b) => (values[b] || 0) - (values[a] || 0)).slice(0, 6);
  list.replaceChildren(...order.map((n) => {
    const fill = make("i");
    fill.style.width = `${100 * Math.min(1, values[n] || 0)}%`;
    return make("li", {}, make("span", { className: "token", title: `${n}: ${data.labels[n]}` }, data.labels[n]), make("span", { className: "bar", "aria-hidden": "true" }, fill), make("span", { className: "value" }, shown(values[n])));
  }));
}

const rowOf = (p, i) => p.subarray(i * LENGTH, (i + 1) * LENGTH);
const columnOf = (p, j) => Float32Array.from({ length: LENGTH }, (_, i) => p[i * LENGTH + j]);

function choose(token) {
  state.token = Math.max(0, Math.min(LENGTH - 1, token));
  state.preview = null;
  remember();
  if (IS_IMAGE && state.thumbs === "patch") drawGrid();
  drawHead();
}

// ---------------------------------------------------------------- the address, the table, the theme

function remember() {
  if (location.protocol === "about:") return; // in the frame of a notebook, which has no address of its own
  history.replaceState(null, "", `#layer=${state.layer}&head=${state.head}&token=${state.token}`);
}

function recall() {
  const given = new URLSearchParams(location.hash.slice(1));
  const read = (name, below, otherwise) => {
    const value = Number(given.get(name) ?? NaN);
    return Number.isInteger(value) && value >= 0 && value < below ? value : otherwise;
  };
  state.layer = read("layer", LAYERS, state.layer);
  state.head = read("head", data.heads[state.layer], state.head);
  state.token = read("token", LENGTH, state.token);
}

/** The head to open first: the one that is likest to something telling. */
function mostTelling() {
  const dull = ["first", "uniform", "local"];
  let best = -1;
  data.heads.forEach((heads, layer) => {
    for (let head = 0; head < heads; head++) {
      const found = IS_IMAGE ? data.looks[layer][head] : data.patterns[layer][head];
      if (!found) continue;
      const value = found[1] - (dull.includes(found[0]) ? 1 : 0);
      if (value > best) [best, state.layer, state.head] = [value, layer, head];
    }
  });
}

function buildTable() {
  const table = byId("statistics");
  [...table.tHead.rows[0].cells].forEach((cell, column) => {
    const button = make("button", { type: "button" }, cell.textContent);
    button.addEventListener("click", () => sortBy(table, column));
    cell.replaceChildren(button);
  });
  for (const row of table.tBodies[0].rows) {
    const button = make("button", { type: "button" }, row.cells[0].textContent);
    button.addEventListener("click", () => {
      open(Number(row.dataset.layer), Number(row.dataset.head));
      byId("one").scrollIntoView({ block: "nearest" });
    });
    row.cells[0].replaceChildren(button);
  }
}

/** Sort by a column: figures from the largest at first, words from A; heads without the figure come last. */
function sortBy(table, column) {
  const headings = table.tHead.rows[0].cells;
  const rows = [...table.tBodies[0].rows];
  const value = (row) => row.cells[column].dataset.value;
  const words = rows.some((row) => value(row) !== "" && Number.isNaN(Number(value(row))));
  const first = words || column === 0 ? "ascending" : "descending";
  const before = headings[column].getAttribute("aria-sort");
  const order = before === "none" ? first : before === "ascending" ? "descending" : "ascending";
  const sign = order === "ascending" ? 1 : -1;
  rows.sort((a, b) => {
    const [x, y] = [value(a), value(b)];
    if (x === "" || y === "") return (x === "") - (y === "");
    return sign * (words ? x.localeCompare(y, "en") : Number(x) - Number(y));
  });
  for (const heading of headings) heading.setAttribute("aria-sort", "none");
  headings[column].setAttribute("aria-sort", order);
  table.tBodies[0].append(...rows);
}

function nextTheme() {
  const root = document.documentElement;
  const themes = { "": look.dark ? "light" : "dark", light: "dark", dark: "light" };
  root.dataset.theme = themes[root.dataset.theme ?? ""];
  byId("theme").setAttribute("aria-label", "Colours of the page: " + root.dataset.theme);
  readColours();
  drawAll();
}

function drawAll() {
  if (!byId("one-body").clientWidth) return; // in a frame without a size yet
  drawGrid();
  drawLegend();
  drawHead();
}

function start() {
  readColours();
  mostTelling();
  recall();
  buildControls();
  buildGrid();
  buildTable();
  if (IS_IMAGE) buildImageHead();
  else buildTextHead();
  markGrid();
  drawAll();
  byId("before").addEventListener("click", () => step(-1));
  byId("after").addEventListener("click", () => step(1));
  byId("theme").addEventListener("click", nextTheme);
  media.addEventListener("change", () => { readColours(); drawAll(); });
  addEventListener("hashchange", () => { recall(); markGrid(); drawAll(); });
  let width = byId("one-body").clientWidth;
  new ResizeObserver(() => {
    if (byId("one-body").clientWidth === width) return; // only the height
    width = byId("one-body").clientWidth;
    requestAnimationFrame(drawAll); // drawing changes sizes, which may not happen while they are observed
  }).observe(byId("one-body"));
}

start();
