// What the views of a history share: names, colours, axes, and the marks of alarms.

import { ticks } from "d3-array";
import type { Colours } from "./field";
import { colour } from "./field";
import { type Alarm, alarms, COUNT, type Curve, indexOf, type Place, placeOn, type Quantity, type What } from "./history_data";
import { data } from "./data";
import { figure, history as texts, local } from "./texts";

const NUMBERED = data.layers.every(({ short }) => /^\d+$/.test(short));

/** A layer on an axis: its number in the model, or else its number among these layers. */
export function layerTick(layer: number): string {
  return NUMBERED ? data.layers[layer].short : String(layer);
}

/** "Head 0.2"; "Head 2" of a single layer; with the name where layers have no numbers. */
export function headName(layer: number, head: number): string {
  if (data.layers.length === 1) return texts.only(head);
  const number = texts.short(layerTick(layer), head);
  return NUMBERED ? texts.head(number) : texts.named(number, data.layers[layer].short);
}

/** The same, as short as an axis needs it. */
export function tickName(layer: number, head: number): string {
  return data.layers.length === 1 ? String(head) : texts.short(layerTick(layer), head);
}

/** Pixels at the right of the map and the charts, for the half of the slider's thumb. */
export const EDGE = 8;

/** Where the middle of a step is on an axis of this width. */
export function across(moment: number, width: number): number {
  return ((moment + 0.5) / COUNT) * width;
}

/** The step at a place of an axis. */
export function momentAt(x: number, width: number): number {
  return Math.max(0, Math.min(COUNT - 1, Math.floor((x / width) * COUNT)));
}

export type Axis = Pick<Quantity, "scale" | "pivot" | "low" | "high">;

/** The axis of one head's values alone. */
export function axisOf(of: Quantity, curves: Curve[]): Axis {
  let [low, high] = [Infinity, -Infinity];
  for (const curve of curves) {
    for (const value of curve) {
      if (!Number.isFinite(value)) continue;
      const u = of.scale === "asinh" ? Math.asinh(value / of.pivot) : value;
      if (u < low) low = u;
      if (u > high) high = u;
    }
  }
  if (low > high) return of;
  if (low === high) return { ...of, low: low - 0.5, high: high + 0.5 };
  return { ...of, low, high };
}

/** The values at the ends of an axis. */
export function ends({ scale, pivot, low, high }: Axis): [number, number] {
  const value = (u: number) => (scale === "asinh" ? pivot * Math.sinh(u) : u);
  const [least, most] = [value(low), value(high)];
  return [Math.abs(least) < 1e-4 * Math.abs(most) ? 0 : least, most];
}

/** A few round values on an axis. */
export function ticksOf(of: Axis): number[] {
  const [low, high] = ends(of);
  if (of.scale === "linear") return ticks(low, high, 3);
  const top = Math.floor(Math.log10(high));
  const decades = Math.max(1, Math.ceil((top - Math.log10(of.pivot)) / 2));
  const found = low <= 0 ? [0] : [];
  for (let power = top; power >= Math.log10(of.pivot); power -= decades) found.push(10 ** power);
  return found;
}

/** A path through values; NaN leaves a gap. */
export function pathOf(of: Axis, curve: Curve, width: number, height: number): string {
  let path = "";
  let pen = false;
  for (let n = 0; n < curve.length; n++) {
    const at = placeOn(of, curve[n]);
    if (at !== at) pen = false;
    else {
      path += `${pen ? "L" : "M"}${across(n, width).toFixed(1)} ${down(at, height).toFixed(1)}`;
      if (!pen && (n + 1 === curve.length || curve[n + 1] !== curve[n + 1])) path += "h0.1"; // a single value
      pen = true;
    }
  }
  return path;
}

/** The area between two curves. */
export function areaOf(of: Axis, low: Curve, high: Curve, width: number, height: number): string {
  const points: string[] = [];
  const point = (curve: Curve, n: number) => `${across(n, width).toFixed(1)} ${down(placeOn(of, curve[n]), height).toFixed(1)}`;
  const pieces: string[] = [];
  const close = (start: number, stop: number) => {
    for (let n = start; n < stop; n++) points.push(point(high, n));
    for (let n = stop - 1; n >= start; n--) points.push(point(low, n));
    if (points.length) pieces.push(`M${points.join("L")}Z`);
    points.length = 0;
  };
  let start = 0;
  for (let n = 0; n <= COUNT; n++) {
    if (n < COUNT && low[n] === low[n] && high[n] === high[n]) continue;
    close(start, n);
    start = n + 1;
  }
  return pieces.join("");
}

const MARGIN = 5;

/** The height of a place on an axis, from above. */
export function down(at: number, height: number): number {
  return MARGIN + (1 - Math.max(0, Math.min(1, at))) * (height - 2 * MARGIN);
}

/** Values in colours, a pixel each; those that are NaN are transparent. */
export function picture(of: Quantity, columns: number, rows: number, colours: Colours, valueAt: (row: number, column: number) => number): HTMLCanvasElement {
  const canvas = document.createElement("canvas");
  canvas.width = columns;
  canvas.height = rows;
  const context = canvas.getContext("2d")!;
  const image = context.createImageData(columns, rows);
  const pixels = new Uint32Array(image.data.buffer);
  const palette = paletteOf(colours);
  for (let row = 0; row < rows; row++) {
    for (let column = 0; column < columns; column++) {
      const place = placeOn(of, valueAt(row, column));
      if (place === place) pixels[row * columns + column] = palette[Math.round(Math.max(0, Math.min(1, place)) * (STEPS - 1))];
    }
  }
  context.putImageData(image, 0, 0);
  return canvas;
}

const STEPS = 256;
const palettes = new Map<Colours, Uint32Array>();

/** The colours of even steps, as the pixels of a canvas have them. */
function paletteOf(colours: Colours): Uint32Array {
  const known = palettes.get(colours);
  if (known) return known;
  const little = new Uint8Array(new Uint32Array([1]).buffer)[0] === 1;
  const found = Uint32Array.from({ length: STEPS }, (_, n) => {
    const [red, green, blue] = colour(n / (STEPS - 1), colours).fill.match(/\d+/g)!.map(Number);
    return (little ? (255 << 24) | (blue << 16) | (green << 8) | red : (red << 24) | (green << 16) | (blue << 8) | 255) >>> 0;
  });
  palettes.set(colours, found);
  return found;
}

/** Draws the mark of an alarm around a point. */
export function drawMark(context: CanvasRenderingContext2D, { what }: Alarm, x: number, y: number, size: number): void {
  context.beginPath();
  for (const [dx, dy] of SHAPES[what]) context.lineTo(x + dx * size, y + dy * size);
  context.closePath();
  context.lineWidth = Math.min(2.5, size / 2);
  context.strokeStyle = ink("panel");
  context.stroke();
  context.fillStyle = ink(`flag-${FLAG[what]}`);
  context.fill();
}

/** The corners of an alarm's mark around (0, 0). */
export const SHAPES: Record<What, [number, number][]> = {
  "entropy collapse": [[-1, -0.9], [1, -0.9], [0, 0.9]],
  "growing logits": [[-1, 0.9], [1, 0.9], [0, -0.9]],
  "rising sink": [[-1, 0], [0, -1], [1, 0], [0, 1]],
};

export const FLAG: Record<What, string> = { "entropy collapse": "collapse", "growing logits": "growing", "rising sink": "sink" };

const byHead = new Map<number, Alarm[]>();
const byMoment = new Map<number, Alarm[]>();
for (const each of alarms) {
  for (const [map, key] of [[byHead, indexOf(each)], [byMoment, each.moment]] as const) {
    const found = map.get(key);
    if (found) found.push(each);
    else map.set(key, [each]);
  }
}

/** The alarms of a head. */
export function alarmsOf(place: Place): Alarm[] {
  return byHead.get(indexOf(place)) ?? [];
}

/** The alarms of a step. */
export function alarmsAt(moment: number): Alarm[] {
  return byMoment.get(moment) ?? [];
}

/** The value of a style's variable. */
export function ink(name: string): string {
  return getComputedStyle(document.documentElement).getPropertyValue(`--${name}`).trim();
}

export function shown(value: number): string {
  return value === Infinity ? "∞" : value === -Infinity ? "−∞" : figure(value);
}

/** A round number, such as a limit, without the zeros that three digits add; short enough for an axis. */
export function round(value: number): string {
  if (Number.isFinite(value) && Math.abs(value) >= 1e5) return local(value.toExponential(1).replace(".0e", "e").replace("e+", "e"));
  return Math.abs(value) < 1000 ? figure(value).replace(/([.,]\d*?)0+$/, "$1").replace(/[.,]$/, "") : figure(value);
}

/** The context of a canvas with so many pixels of the page. */
export function sized(canvas: HTMLCanvasElement, width: number, height: number): CanvasRenderingContext2D {
  const ratio = window.devicePixelRatio || 1;
  canvas.width = Math.round(width * ratio);
  canvas.height = Math.round(height * ratio);
  canvas.style.width = `${width}px`;
  canvas.style.height = `${height}px`;
  const context = canvas.getContext("2d")!;
  context.setTransform(ratio, 0, 0, ratio, 0, 0);
  context.clearRect(0, 0, width, height);
  return context;
}
