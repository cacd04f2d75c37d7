// The map of a head with its axes and the profiles along them, at any zoom.

import { binOf, type Head, hasTokens, type Layer, queryAt, token } from "./data";
import { tiledLengths } from "./exact";
import type { Field, Pictures } from "./field";
import { type Box, FONT, hatch, type Surface } from "./surface";
import { local, map as texts, whole } from "./texts";
import { step } from "./words";

export interface Inks {
  ink: string;
  quiet: string;
  ground: string;
  hidden: string;
  accent: string;
  soft: string;
  profile: string;
}

export interface Geometry {
  width: number;
  height: number;
  plot: Box;
}

/** The visible part of the map: scale, and where its first column and row are on the screen, in pixels of the plot. */
export interface Sight {
  k: number;
  x: number;
  y: number;
}

export interface Scene {
  layer: Layer;
  head: Head;
  field: Field;
  pictures: Pictures;
  sight: Sight;
  geometry: Geometry;
  row: number | null;
  column: number | null;
  cell: [number, number] | null; // the selected query and key, where they are known
  tile: { pictures: Pictures; queries: [number, number]; keys: [number, number]; lengths: [number, number]; window: number | null } | null; // finer than the map
  inks: Inks;
  bands: string[] | null; // the colours of segments, for bands along the axes
  ratio: number; // pixels of the screen for each pixel of the page
}

const PROFILE = 34;

/** The layout of the map in so many pixels of width, and of height if it has to fit one. */
export function geometry(width: number, most: number, layer: Layer, room = Infinity): Geometry {
  const narrow = width < 480 || !hasTokens(layer);
  const [queries] = (layer.other ? null : tiledLengths(layer.index)) ?? layer.lengths ?? [0];
  const left = Math.max(narrow ? 58 : 92, 28 + Math.ceil(measured(whole(queries)))); // numbers are never cut
  const top = (narrow ? 58 : 80) + (hasReceived(layer) ? PROFILE : 0);
  const right = layer.entropy ? PROFILE + 8 : 8;
  const side = Math.max(60, Math.min(width - left - right, most, room - top - 8));
  return { width: left + side + right, height: top + side + 8, plot: { x: left, y: top, width: side, height: side } };
}

/** The visible bins along an axis: the first, and the first after them. */
export function visibleBins(bins: number, side: number, sight: Sight, axis: "x" | "y"): [number, number] {
  const first = (-sight[axis] / sight.k / side) * bins;
  const last = ((side - sight[axis]) / sight.k / side) * bins;
  return [Math.max(0, Math.floor(first)), Math.min(bins, Math.ceil(last))];
}

export function draw(surface: Surface, scene: Scene): void {
  const { geometry, inks, field } = scene;
  const { plot } = geometry;
  surface.box({ x: 0, y: 0, width: geometry.width, height: geometry.height }, inks.ground);
  surface.box(plot, field.signed ? inks.ground : inks.hidden);
  if (field.signed) hatch(surface, plot, inks.quiet); // grey is close to small differences
  surface.within(plot, () => {
    picture(surface, scene);
    finer(surface, scene);
    selection(surface, scene);
  });
  surface.frame(plot, inks.quiet, 1);
  if (scene.bands) for (const which of ["query", "key"] as const) bands(surface, scene, which, scene.bands);
  axis(surface, scene, "query");
  axis(surface, scene, "key");
  if (hasReceived(scene.layer) && !field.signed) profile(surface, scene, "key");
  if (scene.layer.entropy && !field.signed) profile(surface, scene, "query");
}

function picture(surface: Surface, { geometry: { plot }, sight, pictures, field, ratio }: Scene): void {
  const canvas = pictures.fit(plot.width * sight.k * ratio);
  // only the visible part: scaling a large map whole to show a small part of it is slow
  const across = canvas.width / (plot.width * sight.k);
  const down = canvas.height / (plot.height * sight.k);
  const from = { x: -sight.x * across, y: -sight.y * down, width: plot.width * across, height: plot.height * down };
  if (field.values.length > 0) surface.image(canvas, from, plot);
}

/** The tile over its part of the map. */
function finer(surface: Surface, { geometry: { plot }, sight, tile, inks }: Scene): void {
  if (!tile) return;
  const [queries, keys] = tile.lengths;
  const canvas = tile.pictures.fit(Infinity);
  const at = (from: number, length: number) => (from / length) * plot.width * sight.k;
  const box = {
    x: plot.x + sight.x + at(tile.keys[0], keys),
    y: plot.y + sight.y + at(tile.queries[0], queries),
    width: at(tile.keys[1] - tile.keys[0], keys),
    height: at(tile.queries[1] - tile.queries[0], queries),
  };
  surface.box(box, inks.hidden);
  surface.image(canvas, { x: 0, y: 0, width: canvas.width, height: canvas.height }, box);
}

function selection(surface: Surface, { geometry: { plot }, sight, field, row: binRow, column: binColumn, cell, tile, inks }: Scene): void {
  const [row, column, rows, columns] = cell && tile ? [...cell, ...tile.lengths] : [binRow, binColumn, field.rows, field.columns];
  const [across, down] = [(plot.width * sight.k) / columns, (plot.height * sight.k) / rows];
  if (row !== null) {
    const box = { x: plot.x - 2, y: plot.y + sight.y + row * down, width: plot.width + 4, height: Math.max(down, 2) };
    surface.frame(box, inks.ground, 4);
    surface.frame(box, inks.accent, 2);
  }
  if (column !== null) {
    const box = { x: plot.x + sight.x + column * across, y: plot.y - 2, width: Math.max(across, 2), height: plot.height + 4 };
    surface.frame(box, inks.ground, 4);
    surface.frame(box, inks.accent, 2);
  }
}

const BAND = 5; // pixels

/** The segments along an axis, in colours. */
function bands(surface: Surface, { layer, geometry: { plot }, sight }: Scene, which: "query" | "key", colours: string[]): void {
  const length = layer.lengths![which === "query" ? 0 : 1];
  const side = plot.width * sight.k;
  const offset = which === "query" ? plot.y + sight.y : plot.x + sight.x;
  const low = which === "query" ? plot.y : plot.x;
  const shift = which === "query" ? queryAt(layer, 0) : 0;
  for (const [segment, start, stop] of layer.segments!.spans) {
    const from = Math.max(low, offset + ((start - shift) / length) * side);
    const to = Math.min(low + plot.width, offset + ((stop - shift) / length) * side);
    if (to <= from) continue;
    const fill = colours[segment % colours.length];
    surface.box(which === "query" ? { x: plot.x - BAND - 1, y: from, width: BAND, height: to - from } : { x: from, y: plot.y - BAND - 1, width: to - from, height: BAND }, fill);
  }
}

// ---------------------------------------------------------------- axes

const LEAST = 13; // pixels between labels

function axis(surface: Surface, scene: Scene, which: "query" | "key"): void {
  const { geometry: { plot }, sight, layer, inks, field } = scene;
  const bins = which === "query" ? field.rows : field.columns;
  const [start, stop] = visibleBins(bins, plot.width, sight, which === "query" ? "y" : "x");
  const size = (plot.width * sight.k) / bins;
  const tokens = hasTokens(layer) && singles(layer, which) && size >= LEAST;
  const { ranges } = layer.map!;
  const lengths = ranges ? layer.lengths : scene.tile?.lengths; // over calls of different lengths, those of the visible tile
  const length = lengths ? lengths[which === "query" ? 0 : 1] : bins;
  const each = (size * bins) / length; // pixels of a position
  const every = tokens ? 1 : step((LEAST * (which === "query" ? 1.6 : 3.6)) / each);
  const low = which === "query" ? plot.y : plot.x;
  const offset = low + (which === "query" ? sight.y : sight.x);
  for (let n = Math.ceil((start / bins) * length / every) * every; n < (stop / bins) * length; n += every) {
    const at = offset + (n + Math.min(0.5, size / each / 2)) * each;
    if (at < low || at > low + plot.width) continue;
    const text = tokens ? label(layer, which, n) : whole(n);
    const chosen = binOf(n, bins, length) === (which === "query" ? scene.row : scene.column);
    const options = { fill: chosen ? inks.accent : inks.ink, size: 11 } as const;
    if (which === "query") surface.text(fitted(text, plot.x - 26), plot.x - 6 - (scene.bands ? BAND : 0), at, { ...options, anchor: "end" });
    else if (tokens) surface.text(fitted(text, plot.y - profileBottom(scene) - 12), at, plot.y - 6 - (scene.bands ? BAND : 0), { ...options, anchor: "start", upright: true });
    else surface.text(text, at, plot.y - 10, { ...options, anchor: "middle" });
  }
  const quiet = { fill: inks.quiet, size: 11 } as const;
  const window = scene.tile?.window ?? null;
  const name = ranges ? texts.axis(which) : window !== null ? texts.axisOfWindow(which, window) : lengths ? texts.axisOfLast(which) : texts.axisOfBins(which);
  if (which === "query") surface.text(name, 9, plot.y + plot.height / 2, { ...quiet, anchor: "middle", upright: true });
  else surface.text(name, plot.x + plot.width, profileTop(scene) - 9, { ...quiet, anchor: "end" });
}

function profileTop({ geometry: { plot }, layer }: Scene): number {
  return hasReceived(layer) ? 18 : plot.y - 40;
}

function profileBottom({ layer }: Scene): number {
  return hasReceived(layer) ? 18 + PROFILE - 6 : 0;
}

/** Whether received weight is drawn above the map: over calls of different lengths its keys do not line up with the bins. */
function hasReceived({ received, map }: Layer): boolean {
  return received > 0 && map!.ranges;
}

/** Whether a bin is one position. */
export function singles(layer: Layer, which: "query" | "key"): boolean {
  const map = layer.map;
  if (!map?.ranges || !layer.lengths) return false;
  return which === "query" ? layer.lengths[0] === map.rows : layer.lengths[1] === map.columns;
}

function label(layer: Layer, which: "query" | "key", at: number): string {
  return token(which === "query" ? queryAt(layer, at) : at, false, layer) ?? String(at);
}

const ruler = document.createElement("canvas").getContext("2d")!;
const fits = new Map<string, string>();

function measured(text: string): number {
  ruler.font = `11px ${FONT}`;
  return ruler.measureText(text).width;
}

/** As much of a text as fits so many pixels at a size of 11. */
export function fitted(text: string, room: number): string {
  const key = `${room}/${text}`;
  const known = fits.get(key);
  if (known !== undefined) return known;
  let shown = text;
  const letters = [...text];
  while (letters.length > 1 && measured(shown) > room) {
    letters.pop();
    shown = `${letters.join("")}…`;
  }
  if (fits.size > 5000) fits.clear();
  fits.set(key, shown);
  return shown;
}

// ---------------------------------------------------------------- along the axes

/** Received weight above the map, entropy to the right of it, each from 0 to its largest. */
function profile(surface: Surface, scene: Scene, which: "query" | "key"): void {
  const { geometry: { plot }, sight, inks, head, layer, field } = scene;
  const values = which === "key" ? head.received : head.entropy;
  const length = layer.lengths?.[which === "key" ? 1 : 0] ?? layer.receivedOf;
  const share = (which === "key" ? layer.receivedOf : layer.entropyOf) / length; // by absolute position it can be longer
  // where the first column is hidden, so are the bars above it
  const hidden = which === "key" && field.sink ? Math.ceil(values.length / share / field.columns) : 0;
  let most = 0;
  for (let n = hidden; n < values.length; n++) if (values[n] > most) most = values[n];
  const side = plot.width * sight.k * share;
  const offset = which === "key" ? plot.x + sight.x : plot.y + sight.y;
  const low = which === "key" ? 18 + PROFILE - 6 : plot.x + plot.width + 6;
  const reach = (PROFILE - 10) / (most || 1);
  const box = which === "key"
    ? { x: plot.x, y: 18, width: plot.width, height: PROFILE - 6 }
    : { x: low, y: plot.y, width: PROFILE - 4, height: plot.height };
  surface.box(box, inks.soft);
  surface.within(box, () => {
    const points: [number, number][] = [];
    const add = (at: number, value: number) => points.push(which === "key" ? [at, low - value * reach] : [low + value * reach, at]);
    const first = Math.max(0, Math.floor((-sight[which === "key" ? "x" : "y"] / side) * values.length));
    const last = Math.min(values.length, Math.ceil(((plot.width - sight[which === "key" ? "x" : "y"]) / side) * values.length));
    if (last <= first) return;
    add(offset + (first / values.length) * side, 0);
    for (let n = first; n < last; n++) {
      const value = n >= hidden && Number.isFinite(values[n]) ? values[n] : 0;
      add(offset + (n / values.length) * side, value);
      add(offset + ((n + 1) / values.length) * side, value);
    }
    add(offset + (last / values.length) * side, 0);
    surface.path(points, inks.profile);
  });
  const room = which === "key" ? plot.width - measured(texts.axis(which)) - 12 : plot.y - 10;
  const variants = (which === "key" ? texts.received : texts.entropy)(local(most.toPrecision(2)));
  const text = variants.find((each) => measured(each) <= room) ?? variants[variants.length - 1];
  const quiet = { fill: inks.quiet, size: 11 } as const;
  if (which === "key") surface.text(text, plot.x, 9, { ...quiet, anchor: "start" });
  else surface.text(text, plot.x + plot.width + 6 + PROFILE / 2, plot.y - 8, { ...quiet, anchor: "start", upright: true });
}
