"use strict";
// Part one: the data of the page, its colours, and how maps are drawn. Part two, page.js, puts them on the screen.

const data = JSON.parse(document.getElementById("data").textContent);
const LENGTH = data.tokens.length;
const LAYERS = data.weights.length;
const IS_IMAGE = data.kind === "image";

// ---------------------------------------------------------------- weights

function bytes(base64) {
  const text = atob(base64);
  const out = new Uint8Array(text.length);
  for (let n = 0; n < text.length; n++) out[n] = text.charCodeAt(n);
  return out;
}

const seenBits = data.seen === "all" || data.seen === "causal" ? null : bytes(data.seen);

/** Whether query i may see key j. */
function sees(i, j) {
  if (data.seen === "all") return true;
  if (data.seen === "causal") return j <= i;
  const at = i * LENGTH + j;
  return ((seenBits[at >> 3] >> (7 - (at & 7))) & 1) === 1;
}

const decoded = [];
let anyBroken = false; // among the layers decoded so far

/** The weights of one head, row after row; NaN where a weight was NaN or infinite. */
function weightsOf(layer, head) {
  if (!decoded[layer]) decoded[layer] = decode(layer);
  return decoded[layer].subarray(head * LENGTH * LENGTH, (head + 1) * LENGTH * LENGTH);
}

function decode(layer) {
  const { bits, top, broken, triangle } = data.encoding;
  const raw = bytes(data.weights[layer]);
  const step = bits / 8;
  const out = new Float32Array(data.heads[layer] * LENGTH * LENGTH);
  let from = 0;
  for (let row = 0; row < data.heads[layer] * LENGTH; row++) {
    const columns = triangle ? (row % LENGTH) + 1 : LENGTH;
    for (let j = 0; j < columns; j++, from += step) {
      const code = step === 2 ? raw[from] | (raw[from + 1] << 8) : raw[from];
      out[row * LENGTH + j] = code === broken ? NaN : (code / top) ** 2;
      if (code === broken) anyBroken = true;
    }
  }
  return out;
}

/** The largest weight of a head among rows that have a choice: a row with one visible key is always 1. */
const largest = new Map();
function maximumOf(layer, head) {
  const key = layer + " " + head;
  if (!largest.has(key)) {
    const p = weightsOf(layer, head);
    let most = 0;
    for (let i = 0; i < LENGTH; i++) {
      let choices = 0, best = 0;
      for (let j = 0; j < LENGTH; j++) {
        if (!sees(i, j)) continue;
        choices++;
        if (p[i * LENGTH + j] > best) best = p[i * LENGTH + j];
      }
      if (choices > 1 && best > most) most = best;
    }
    largest.set(key, most || 1);
  }
  return largest.get(key);
}

/** Mean over all patches of what each patch receives. */
function received(layer, head) {
  const p = weightsOf(layer, head);
  const out = new Float32Array(LENGTH);
  let rows = 0;
  for (let i = 0; i < LENGTH; i++) {
    const row = p.subarray(i * LENGTH, (i + 1) * LENGTH);
    if (row.some(Number.isNaN)) continue;
    rows++;
    for (let j = 0; j < LENGTH; j++) out[j] += row[j];
  }
  return out.map((value) => value / rows);
}

// ---------------------------------------------------------------- colours

// The colours come with the data: 33 anchors of matplotlib's "magma", light to dark in even steps.
const MAGMA = data.magma;

function channel(text, at) {
  return [0, 2, 4].map((from) => parseInt(text.slice(at * 6 + from, at * 6 + from + 2), 16));
}

function mix(a, b, share) {
  return a.map((value, n) => Math.round(value + (b[n] - value) * share));
}

function magma(t) {
  const at = Math.min(31, Math.floor(t * 32));
  return mix(channel(MAGMA, at), channel(MAGMA, at + 1), t * 32 - at);
}

/** 256 colours from nothing to most: from the ground of the page away. */
function colourTable(dark) {
  return Array.from({ length: 256 }, (_, n) => {
    const t = n / 255;
    if (dark) return magma(t);
    return t < 0.1 ? mix([255, 255, 255], magma(0.9), t / 0.1) : magma(1 - t);
  });
}

const media = matchMedia("(prefers-color-scheme: dark)");
const look = { dark: false, table: [], hidden: [], broken: [], line: "", ink: "", quiet: "", accent: "", panel: "" };

function readColours() {
  const theme = document.documentElement.dataset.theme;
  look.dark = theme ? theme === "dark" : media.matches;
  look.table = colourTable(look.dark);
  look.hidden = look.dark ? [52, 48, 60] : [226, 223, 231];
  look.broken = [0, 140, 255];
  look.line = look.dark ? "#3fd0e0" : "#007f95"; // a hue that the maps do not have
  const style = getComputedStyle(document.documentElement);
  for (const name of ["ink", "quiet", "accent", "panel"]) look[name] = style.getPropertyValue("--" + name).trim();
}

/** How far up the colours a weight stands, 0 to 1. */
function shade(value, most, scale) {
  const share = Math.min(1, value / most);
  if (!(share > 0)) return 0;
  if (scale === "root") return Math.sqrt(share);
  return scale === "log" ? Math.max(0, 1 + Math.log10(share) / 4) : share;
}

/** The inverse: the weight at a place on the colours. */
function unshade(place, most, scale) {
  if (scale === "root") return place * place * most;
  return scale === "log" ? 10 ** (4 * (place - 1)) * most : place * most;
}

function colourOf(value, most, scale) {
  return Number.isNaN(value) ? look.broken : look.table[Math.round(255 * shade(value, most, scale))];
}

function css(rgb, alpha = 1) {
  return `rgb(${rgb[0]} ${rgb[1]} ${rgb[2]} / ${alpha})`;
}

/** Black or white, whichever is read better on a colour. */
function inkOn(rgb) {
  const [r, g, b] = rgb.map((c) => (c / 255 <= 0.04045 ? c / 255 / 12.92 : ((c / 255 + 0.055) / 1.055) ** 2.4));
  return 0.2126 * r + 0.7152 * g + 0.0722 * b > 0.18 ? "#000" : "#fff";
}

// ---------------------------------------------------------------- drawing

/** A map of LENGTH x LENGTH as a picture of size x size cells; fewer cells than tokens show the largest weight of each. */
function mapPicture(p, size, most, scale) {
  const picture = new ImageData(size, size);
  const start = (bin) => Math.floor((bin * LENGTH) / size);
  for (let row = 0; row < size; row++) {
    for (let column = 0; column < size; column++) {
      let value = -1; // nothing to see here
      for (let i = start(row); i < start(row + 1); i++) {
        for (let j = start(column); j < start(column + 1); j++) {
          const here = p[i * LENGTH + j];
          if (sees(i, j) && (Number.isNaN(here) || here > value)) value = here;
          if (Number.isNaN(value)) break;
        }
        if (Number.isNaN(value)) break;
      }
      const rgb = value < 0 ? look.hidden : colourOf(value, most, scale);
      picture.data.set([rgb[0], rgb[1], rgb[2], 255], 4 * (row * size + column));
    }
  }
  return picture;
}

function drawMap(canvas, p, size, most, scale) {
  canvas.width = canvas.height = size;
  canvas.getContext("2d").putImageData(mapPicture(p, size, most, scale), 0, 0);
}

let imageCanvas = null;

/** The image itself, a canvas with one pixel for each of its own. */
function theImage() {
  if (imageCanvas) return imageCanvas;
  const { height, width, rgb } = data.image;
  const raw = bytes(rgb);
  const picture = new ImageData(width, height);
  for (let n = 0; n < height * width; n++) picture.data.set([raw[3 * n], raw[3 * n + 1], raw[3 * n + 2], 255], 4 * n);
  imageCanvas = document.createElement("canvas");
  imageCanvas.width = width;
  imageCanvas.height = height;
  imageCanvas.getContext("2d").putImageData(picture, 0, 0);
  return imageCanvas;
}

/** Where object and ground meet, as lines between patches: [row, column, along the row or not]. */
function outline() {
  const [rows, columns] = data.grid;
  const lines = [];
  for (let n = 0; n < LENGTH && data.object; n++) {
    const [row, column] = [Math.floor(n / columns), n % columns];
    if (column + 1 < columns && data.object[n] !== data.object[n + 1]) lines.push([row, column + 1, false]);
    if (row + 1 < rows && data.object[n] !== data.object[n + columns]) lines.push([row + 1, column, true]);
  }
  return lines;
}

/** Patches in colours (or, without values, the image), with the outline of the object and a frame around one patch. */
function drawPatches(canvas, values, width, most, scale, chosen) {
  const [rows, columns] = data.grid;
  const cell = Math.max(1, Math.floor(width / columns));
  canvas.width = cell * columns;
  canvas.height = cell * rows;
  const g = canvas.getContext("2d");
  g.imageSmoothingEnabled = false;
  if (!values) g.drawImage(theImage(), 0, 0, canvas.width, canvas.height);
  for (let n = 0; values && n < LENGTH; n++) {
    g.fillStyle = css(colourOf(values[n], most, scale));
    g.fillRect((n % columns) * cell, Math.floor(n / columns) * cell, cell, cell);
  }
  const thick = Math.max(1, Math.round(cell / 14));
  g.lineCap = "square";
  for (const [colour, by] of [[look.dark ? "#000" : "#fff", 2 * thick], [look.line, thick]]) {
    if (by > thick && cell < 12) continue; // too small for an edge around the line
    g.strokeStyle = colour;
    g.lineWidth = by;
    g.beginPath();
    for (const [row, column, along] of outline()) {
      g.moveTo(column * cell, row * cell);
      g.lineTo((column + (along ? 1 : 0)) * cell, (row + (along ? 0 : 1)) * cell);
    }
    g.stroke();
  }
  if (chosen === null) return;
  for (const [colour, inset] of [["#000", 0.5], ["#fff", 1.5]]) {
    g.strokeStyle = colour;
    g.lineWidth = thick;
    const by = inset * thick;
    g.strokeRect((chosen % columns) * cell + by, Math.floor(chosen / columns) * cell + by, cell - 2 * by, cell - 2 * by);
  }
}
