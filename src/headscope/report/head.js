// One head, large: over text a map with both axes and a strip of tokens, over an image pictures of its patches.

const view = {}; // the nodes that are drawn anew

// ---------------------------------------------------------------- text

function buildTextHead() {
  view.base = make("canvas", { tabIndex: 0, role: "img", "aria-label": "Attention map. Arrow keys move from cell to cell, Enter pins the row's token." });
  view.over = make("canvas", { className: "over", "aria-hidden": "true" });
  view.map = make("div", { className: "map" }, view.base, view.over);
  view.readout = make("p", { className: "readout", role: "status" });
  view.strip = make("div", { className: "strip", role: "group", "aria-label": "Tokens. Point at one to see where it looks, press to pin it." });
  view.direction = choice("Token colours", "direction", [["row", "where the token looks"], ["column", "who looks at it"]]);
  view.out = make("ol", { className: "ranks" });
  view.in = make("ol", { className: "ranks" });
  view.outTitle = make("h3");
  view.inTitle = make("h3");
  byId("one-body").append(
    view.map, view.readout,
    make("div", { className: "controls" }, view.direction), view.strip,
    make("div", { className: "pair" }, make("div", {}, view.outTitle, view.out), make("div", {}, view.inTitle, view.in)),
    make("dl", { className: "facts", id: "facts" }),
  );
  data.labels.forEach((label, n) => {
    const button = make("button", { type: "button", dir: "auto" }, label);
    button.addEventListener("pointerenter", () => preview(n));
    button.addEventListener("focus", () => preview(n));
    button.addEventListener("blur", () => preview(null));
    button.addEventListener("click", () => choose(n));
    view.strip.append(button);
  });
  view.strip.addEventListener("pointerleave", () => preview(null));
  view.base.addEventListener("pointermove", (event) => point(cellAt(event)));
  view.base.addEventListener("pointerleave", () => point(null));
  view.base.addEventListener("click", (event) => { const cell = cellAt(event); if (cell) choose(cell[0]); });
  view.base.addEventListener("keydown", moveInMap);
}

function preview(token) {
  if (state.preview === token) return;
  state.preview = token;
  drawToken();
}

function point(cell) {
  state.cell = cell;
  state.preview = cell ? cell[0] : null;
  drawToken();
}

function moveInMap(event) {
  const by = { ArrowLeft: [0, -1], ArrowRight: [0, 1], ArrowUp: [-1, 0], ArrowDown: [1, 0] }[event.key];
  if (event.key === "Enter" && state.cell) choose(state.cell[0]);
  if (!by) return;
  event.preventDefault();
  const [i, j] = state.cell ?? [state.token, state.token];
  const inside = (n) => Math.max(0, Math.min(LENGTH - 1, n));
  point(state.cell ? [inside(i + by[0]), inside(j + by[1])] : [i, j]);
}

/** Where the map lies on its canvas, in device pixels. */
let place = null;

function measure() {
  const dpr = devicePixelRatio;
  const width = view.map.clientWidth * dpr;
  const font = `${Math.round((view.map.clientWidth < 480 ? 10.5 : 12) * dpr)}px ui-monospace, "DejaVu Sans Mono", Consolas, monospace`;
  const g = view.base.getContext("2d");
  g.font = font;
  const widest = Math.max(...data.labels.map((label) => g.measureText(label).width));
  const left = Math.ceil(Math.min(widest, 0.26 * width) + 10 * dpr);
  const top = Math.ceil(Math.min(widest, 120 * dpr) + 10 * dpr);
  const room = Math.floor(width - left - 2 * dpr);
  const fits = Math.min(room / LENGTH, 60 * dpr);
  const cell = fits >= 6 ? Math.floor(fits) : fits; // small cells may differ by a pixel, so that no room is wasted
  const size = Math.round(cell * LENGTH);
  place = { left, top, size, cell, dpr, font, g, every: Math.ceil((13 * dpr) / cell) };
  for (const canvas of [view.base, view.over]) {
    canvas.width = left + size + 2 * dpr;
    canvas.height = top + size + 2 * dpr;
    canvas.style.width = `${canvas.width / dpr}px`;
    canvas.style.height = `${canvas.height / dpr}px`;
  }
}

function cellAt(event) {
  const box = view.base.getBoundingClientRect();
  const at = (where, from) => Math.floor((((where * place.dpr) - from) / place.size) * LENGTH);
  const i = at(event.clientY - box.top, place.top);
  const j = at(event.clientX - box.left, place.left);
  return i >= 0 && j >= 0 && i < LENGTH && j < LENGTH ? [i, j] : null;
}

function drawTextHead() {
  measure();
  const { left, top, size, cell, g } = place;
  const p = weightsOf(state.layer, state.head);
  const most = mostOf(state.layer, state.head);
  const small = document.createElement("canvas");
  drawMap(small, p, Math.min(LENGTH, size), most, state.scale);
  g.imageSmoothingEnabled = false;
  g.drawImage(small, left, top, size, size);
  g.fillStyle = look.quiet;
  for (let n = 0; n < LENGTH; n += place.every) {
    drawLabel(g, n, true, look.quiet);
    drawLabel(g, n, false, look.quiet);
  }
  if (cell >= 30 * place.dpr) drawNumbers(g, p, most);
  drawToken();
  bringIntoSight(view.strip.children[state.token]);
}

/** Scroll the strip, not the page, so that the token is in its lower part: where it looks lies mostly before it. */
function bringIntoSight(token) {
  const { scrollTop, clientHeight } = view.strip;
  const [above, below] = [token.offsetTop, token.offsetTop + token.offsetHeight];
  if (above < scrollTop || below > scrollTop + clientHeight) view.strip.scrollTop = below - 0.8 * clientHeight;
}

/** A token beside its row, or above its column. */
function drawLabel(g, n, isRow, colour, weight = "") {
  const { left, top, size, dpr, font } = place;
  const at = ((n + 0.5) * size) / LENGTH;
  g.save();
  g.font = `${weight} ${font}`;
  g.fillStyle = colour;
  g.textBaseline = "middle";
  g.direction = "ltr";
  g.translate(isRow ? left - 5 * dpr : left + at, isRow ? top + at : top - 5 * dpr);
  if (!isRow) g.rotate(-Math.PI / 2);
  g.textAlign = isRow ? "right" : "left";
  g.fillText(fitted(g, data.labels[n], (isRow ? left : top) - 8 * dpr), 0, 0);
  g.restore();
}

/** As much of a text as there is room for. */
function fitted(g, text, room) {
  if (g.measureText(text).width <= room) return text;
  const letters = [...text];
  while (letters.length > 1 && g.measureText(letters.join("") + "…").width > room) letters.pop();
  return letters.join("") + "…";
}

function drawNumbers(g, p, most) {
  const { left, top, cell, dpr } = place;
  g.font = `${Math.round(Math.min(13 * dpr, 0.32 * cell))}px system-ui, sans-serif`;
  g.textAlign = "center";
  g.textBaseline = "middle";
  for (let i = 0; i < LENGTH; i++) {
    for (let j = 0; j < LENGTH; j++) {
      const value = p[i * LENGTH + j];
      if (!sees(i, j)) continue;
      g.fillStyle = inkOn(colourOf(value, most, state.scale));
      g.fillText(Number.isNaN(value) ? "NaN" : value.toFixed(2), left + (j + 0.5) * cell, top + (i + 0.5) * cell);
    }
  }
}

/** All that depends on the token or the cell that is pointed at. */
function drawToken() {
  const token = active();
  const p = weightsOf(state.layer, state.head);
  drawCross(token);
  drawReadout(p);
  const row = rowOf(p, token);
  const column = columnOf(p, token);
  view.outTitle.replaceChildren(tokenNode(token), ` (${token}) looks at`);
  view.inTitle.replaceChildren(tokenNode(token), ` (${token}) is looked at by`);
  ranks(view.out, row, (j) => sees(token, j));
  ranks(view.in, column, (i) => sees(i, token));
  const most = mostOf(state.layer, state.head);
  const values = state.direction === "row" ? row : column;
  [...view.strip.children].forEach((button, n) => {
    const hidden = state.direction === "row" ? !sees(token, n) : !sees(n, token);
    const colour = hidden ? look.hidden : colourOf(values[n], most, state.scale);
    button.classList.toggle("hidden", hidden);
    button.style.background = hidden ? "" : css(colour);
    button.style.color = hidden ? "" : inkOn(colour);
    button.setAttribute("aria-pressed", String(n === state.token));
    button.title = hidden ? "may not be seen" : shown(values[n]);
  });
}

function drawCross(token) {
  const { left, top, size, dpr } = place;
  const g = view.over.getContext("2d");
  g.clearRect(0, 0, view.over.width, view.over.height);
  const step = size / LENGTH;
  g.strokeStyle = look.accent;
  g.lineWidth = 2 * dpr;
  const box = (x, y, w, h) => g.strokeRect(left + x - dpr, top + y - dpr, w + 2 * dpr, h + 2 * dpr);
  box(0, token * step, size, step);
  strong(g, token, true);
  if (!state.cell) return;
  box(state.cell[1] * step, 0, step, size);
  strong(g, state.cell[1], false);
}

/** A label that stands out, also where there was no room for all of them. */
function strong(g, n, isRow) {
  const { left, top, size, dpr } = place;
  const at = ((n + 0.5) * size) / LENGTH;
  g.fillStyle = look.panel;
  if (isRow) g.fillRect(0, top + at - 9 * dpr, left - 3 * dpr, 18 * dpr);
  else g.fillRect(left + at - 9 * dpr, 0, 18 * dpr, top - 3 * dpr);
  drawLabel(g, n, isRow, look.accent, "bold");
}

function drawReadout(p) {
  if (!state.cell) {
    view.readout.replaceChildren("Point at a cell for its weight; press to pin its row's token.");
    return;
  }
  const [i, j] = state.cell;
  const value = sees(i, j) ? make("b", {}, shown(p[i * LENGTH + j])) : "may not be seen";
  view.readout.replaceChildren(tokenNode(i), ` (${i}) → `, tokenNode(j), ` (${j}): `, value);
}

// ---------------------------------------------------------------- an image

function buildImageHead() {
  const texts = {
    image: "The image. Arrow keys choose a patch.",
    patch: "Where the chosen patch looks. Arrow keys choose another patch.",
    mean: "Where all patches look on average. Arrow keys choose a patch.",
    whole: "The whole map, patch by patch. Arrow keys choose a patch.",
  };
  const pictures = make("div", { className: "pictures" });
  view.captions = {};
  for (const [name, text] of Object.entries(texts)) {
    const canvas = make("canvas", { tabIndex: 0, role: "img", "aria-label": text });
    canvas.addEventListener("click", (event) => choose(patchAt(name, event)));
    canvas.addEventListener("pointermove", (event) => drawPatchReadout(name, event));
    canvas.addEventListener("pointerleave", () => drawPatchReadout(null));
    canvas.addEventListener("keydown", movePatch);
    view[name] = canvas;
    view.captions[name] = make("figcaption");
    pictures.append(make("figure", {}, canvas, view.captions[name]));
  }
  view.readout = make("p", { className: "readout", role: "status" });
  view.regions = make("ul", { className: "regions" });
  byId("one-body").append(
    pictures,
    view.readout,
    make("h3", {}, "What it looks at, against an even spread"),
    view.regions,
    make("dl", { className: "facts", id: "facts" }),
  );
}

/** The patch under the pointer; on the whole map the patch whose row it is. */
function patchAt(name, event) {
  const box = view[name].getBoundingClientRect();
  const [rows, columns] = data.grid;
  const down = (parts) => partAt(event.clientY - box.top, box.height, parts);
  if (name === "whole") return down(LENGTH);
  return down(rows) * columns + partAt(event.clientX - box.left, box.width, columns);
}

const partAt = (at, length, parts) => Math.max(0, Math.min(parts - 1, Math.floor((at / length) * parts)));

function movePatch(event) {
  const columns = data.grid[1];
  const by = { ArrowLeft: -1, ArrowRight: 1, ArrowUp: -columns, ArrowDown: columns }[event.key];
  if (!by) return;
  event.preventDefault();
  if (state.token + by >= 0 && state.token + by < LENGTH) choose(state.token + by);
}

function drawImageHead() {
  const { layer, head, token } = state;
  const p = weightsOf(layer, head);
  const row = rowOf(p, token);
  const mean = received(layer, head);
  const width = 48 * data.grid[1];
  drawPatches(view.image, null, width, 1, state.scale, token);
  drawPatches(view.patch, row, width, strongest(row, layer, head), state.scale, token);
  drawPatches(view.mean, mean, width, strongest(mean, layer, head), state.scale, null);
  drawWhole(p, width);
  const best = (values) => {
    const at = values.reduce((most, value, n) => (value > values[most] ? n : most), 0);
    return `Most on ${data.tokens[at]}: ${shown(values[at])}, ${(values[at] * LENGTH).toFixed(1)} × an even spread.`;
  };
  view.captions.image.textContent = "The image. Press a patch to see where it looks.";
  view.captions.patch.textContent = `Where the framed patch (${data.tokens[token]}) looks. ${best(row)}`;
  view.captions.mean.textContent = `Where all patches look on average. ${best(mean)}`;
  view.captions.whole.textContent = "Patch by patch, in reading order: a row looks, a column is looked at.";
  drawPatchReadout(null);
  drawRegions();
}

function drawWhole(p, width) {
  const small = document.createElement("canvas");
  const cell = Math.max(1, Math.round(width / LENGTH));
  drawMap(small, p, LENGTH, mostOf(state.layer, state.head), state.scale);
  view.whole.width = view.whole.height = cell * LENGTH;
  const g = view.whole.getContext("2d");
  g.imageSmoothingEnabled = false;
  g.drawImage(small, 0, 0, cell * LENGTH, cell * LENGTH);
  g.strokeStyle = look.line;
  g.lineWidth = 2;
  g.strokeRect(0, state.token * cell - 1, cell * LENGTH, cell + 2);
}

function drawPatchReadout(name, event) {
  if (!name) {
    view.readout.textContent = "Point at a patch for its number.";
    return;
  }
  const p = weightsOf(state.layer, state.head);
  const patch = patchAt(name, event);
  const say = (from, to) => `${data.tokens[from]} → ${data.tokens[to]}: ${shown(p[from * LENGTH + to])}`;
  if (name === "whole") {
    const box = view.whole.getBoundingClientRect();
    view.readout.textContent = say(patch, partAt(event.clientX - box.left, box.width, LENGTH));
  } else if (name === "mean") {
    view.readout.textContent = `all patches → ${data.tokens[patch]}: ${shown(received(state.layer, state.head)[patch])} on average`;
  } else view.readout.textContent = say(state.token, patch);
}

function drawRegions() {
  const { layer, head } = state;
  const found = data.looks[layer][head];
  const regions = data.regions[layer];
  const aside = ["distance_ratio", "layout_r2"];
  const names = Object.keys(regions).filter((name) => !aside.includes(name));
  const most = Math.max(4, ...names.map((name) => regions[name][head] ?? 0));
  view.regions.replaceChildren(...names.map((name) => {
    const ratio = regions[name][head];
    const fill = make("i");
    const chance = make("u", { title: "an even spread" });
    fill.style.width = `${(100 * (ratio ?? 0)) / most}%`;
    chance.style.width = `${100 / most}%`;
    const canvas = make("canvas", { "aria-hidden": "true" });
    if (data.regionMaps[name]) drawPatches(canvas, data.regionMaps[name], 48, 1, "linear", null);
    else canvas.width = canvas.height = 1;
    return make(
      "li",
      { className: found && found[0] === name ? "most" : "", title: data.words[name].meaning },
      canvas,
      make("span", {}, data.words[name].heading),
      make("span", { className: "bar", "aria-hidden": "true" }, fill, chance),
      make("span", { className: "value" }, ratio === null ? "–" : "× " + ratio.toFixed(2)),
    );
  }));
  const extra = aside.map((name) => `${data.words[name].heading} ${rounded(regions[name][head])}`).join(" · ");
  view.regions.append(make("li", { className: "hint" }, make("span"), make("span"), make("span", {}, extra)));
}
