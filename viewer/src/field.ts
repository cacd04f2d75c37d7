// The values of a map as the switches choose them, their colours, and smaller versions for maps with many bins per pixel.

import { interpolateCividis, interpolateMagma, interpolatePuOr, interpolateViridis } from "d3-scale-chromatic";
import type { HeadMap } from "./data";

export type Pool = "mean" | "max";
export type Scale = "linear" | "log";
/** The palettes that a reader chooses from: "blues" is white, blue, ink. */
export const PALETTES = ["blues", "viridis", "cividis", "magma"] as const;
/** What is drawn: on a dark page "blues" is reversed, so that no weight is the darkest colour there. */
export type Colours = (typeof PALETTES)[number] | "blues-dark";

export function coloursOf(palette: Colours, dark: boolean): Colours {
  return palette === "blues" && dark ? "blues-dark" : palette;
}

export const DECADES = 4; // that the log scale spans

/** Values row by row, NaN = masked. */
export interface Field {
  rows: number;
  columns: number;
  values: Float32Array;
  top: number;
  above: boolean; // some value is visibly larger than `top`
  pool: Pool;
  signed: boolean;
  sink: boolean; // without the first column
}

/** The most rows and columns of a map that is drawn by its largest weight; and of one from which a quantile is taken. */
export const FEW_CELLS = 64;
const QUANTILE_CELLS = 128;
const QUANTILE = 0.995;

/** The value at the end of the colour scale: the largest one of rows with two or more visible bins, because a row with one is
 * always near 1; and whether another value is larger. Of many cells a few large ones would leave all others white: there the end is a
 * quantile of the cells, pooled by their largest value, without the first rows. */
export function topOf(values: Float32Array, rows: number, columns: number): { top: number; above: boolean } {
  let top = 0;
  let any = 0;
  for (let r = 0; r < rows; r++) {
    let visible = 0;
    let most = 0;
    for (let n = r * columns; n < (r + 1) * columns; n++) {
      if (values[n] === values[n]) {
        visible++;
        if (values[n] > most) most = values[n];
      }
    }
    if (visible > 1) top = Math.max(top, most);
    any = Math.max(any, most);
  }
  if (hasQuantile({ rows, columns })) top = quantileOf({ values, rows, columns }) || top;
  return { top: top || any || 1, above: top > 0 && any > 1.01 * top };
}

/** Whether the colour scale of a map ends at a quantile of its cells. */
export function hasQuantile({ rows, columns }: Pick<Field, "rows" | "columns">): boolean {
  return Math.max(rows, columns) > FEW_CELLS;
}

function quantileOf(of: Cells): number {
  let { values, rows, columns } = of;
  while (Math.max(rows, columns) > QUANTILE_CELLS) ({ values, rows, columns } = halved({ values, rows, columns }));
  return quantile(values.subarray(2 * columns)); // a row of few keys has large weights whatever the head does
}

/** A head's map. Without the sink its first column is left out; means and single weights share what it had, so that a row keeps its sum. */
export function field(map: HeadMap, pool: Pool, sink: boolean, exact: boolean): Field {
  const { rows, columns } = map;
  let values = pool === "max" ? map.max : map.mean;
  if (sink) {
    values = values.slice();
    const divides = pool === "mean" || exact;
    for (let r = 0; r < rows; r++) {
      values[r * columns] = NaN;
      const left = 1 - map.firstShare[r];
      if (!divides) continue;
      for (let n = r * columns + 1; n < (r + 1) * columns; n++) values[n] = left > 1e-6 ? values[n] / left : NaN;
    }
  }
  return { rows, columns, values, ...topOf(values, rows, columns), pool, signed: false, sink };
}

/** Two maps with one scale of colours, so that they can be compared. */
export function onOneScale(a: Field | null, b: Field | null): [Field | null, Field | null] {
  const top = Math.max(a?.top ?? 0, b?.top ?? 0);
  const shared = (of: Field | null) => of && { ...of, top, above: of.above && (of.top === top || of.values.some((value) => value > 1.01 * top)) };
  return [shared(a), shared(b)];
}

/** The difference of two heads, the first less the second; null where their maps have different bins. */
export function difference(a: Field, b: Field): Field | null {
  if (a.rows !== b.rows || a.columns !== b.columns) return null;
  const values = a.values.map((value, n) => value - b.values[n]);
  let top = 0;
  for (const value of values) if (Math.abs(value) > top) top = Math.abs(value);
  return { rows: a.rows, columns: a.columns, values, top: top || 1, above: false, pool: a.pool, signed: true, sink: a.sink };
}

const BINS = 1024;

/** Exact, and without sorting more than the largest values: a page with hundreds of heads asks for it once for each. */
function quantile(values: Float32Array): number {
  let [count, most] = [0, 0];
  for (let n = 0; n < values.length; n++) {
    if (values[n] !== values[n]) continue;
    count++;
    if (values[n] > most) most = values[n];
  }
  if (most === 0) return 0;
  const bins = new Uint32Array(BINS);
  const binOf = (value: number) => Math.floor((value / most) * (BINS - 1));
  for (let n = 0; n < values.length; n++) if (values[n] === values[n]) bins[binOf(values[n])]++;
  const rank = count - Math.floor(QUANTILE * (count - 1)); // its place from the largest one down
  let [bin, above] = [BINS - 1, bins[BINS - 1]];
  while (above < rank) above += bins[--bin];
  const large: number[] = [];
  for (let n = 0; n < values.length; n++) if (values[n] === values[n] && binOf(values[n]) >= bin) large.push(values[n]);
  return large.sort((a, b) => b - a)[rank - 1];
}

type Cells = Pick<Field, "values" | "rows" | "columns">;

const halves = new WeakMap<Float32Array, Cells>(); // the end of the scale and the picture use the same ones

/** Half as many rows and columns: of each four what is furthest from 0. A mean would hide a single line of large weights. */
function halved<T extends Cells>(from: T): T {
  const known = halves.get(from.values);
  if (known) return { ...from, ...known };
  const rows = Math.ceil(from.rows / 2);
  const columns = Math.ceil(from.columns / 2);
  const values = new Float32Array(rows * columns);
  for (let r = 0; r < rows; r++) {
    for (let c = 0; c < columns; c++) {
      let most = NaN;
      for (let y = 2 * r; y < Math.min(2 * r + 2, from.rows); y++) {
        for (let x = 2 * c; x < Math.min(2 * c + 2, from.columns); x++) {
          const value = from.values[y * from.columns + x];
          if (value === value && (most !== most || Math.abs(value) > Math.abs(most))) most = value;
        }
      }
      values[r * columns + c] = most;
    }
  }
  halves.set(from.values, { rows, columns, values });
  return { ...from, rows, columns, values };
}

// ---------------------------------------------------------------- colours

const STEPS = 512;
const tables = new Map<string, Uint8Array>();

/** White, blue, ink in 17 even steps of lightness (OKLab), six hexadecimal digits each: BLUES in src/headscope/report/colours.py. */
const BLUES = "ffffffe0f1ffc0e2ffa2d3fe84c3fd63b3fe47a1f93390ee237fe0196ecf165ebb164fa517418c163472152857121d3c0e1321";

function blues(at: number): string {
  const low = Math.min(15, Math.floor(16 * at));
  const parts = [0, 2, 4].map((n) => {
    const [a, b] = [low, low + 1].map((anchor) => parseInt(BLUES.slice(6 * anchor + n, 6 * anchor + n + 2), 16));
    return Math.round(a + (b - a) * (16 * at - low));
  });
  return `rgb(${parts.join(" ")})`;
}

/** Purple, a grey that is lighter than the ground of a dark page, orange. Near the middle the colours change faster: dark colours that differ
 * as little as those of a light page look the same. */
function signedDark(at: number): string {
  const [end, ground] = [at < 0.5 ? [190, 160, 255] : [255, 170, 80], [44, 41, 50]];
  const share = Math.abs(2 * at - 1) ** 0.6;
  return `rgb(${ground.map((from, n) => Math.round(from + (end[n] - from) * share)).join(" ")})`;
}

/** Orange below chance, blue above it, on the ground of the page. */
function chancePainter(dark: boolean): (at: number) => string {
  const [below, above, ground] = dark ? [[255, 170, 80], [99, 179, 254], [27, 25, 31]] : [[205, 105, 10], [22, 94, 187], [255, 255, 255]];
  return (at) => {
    const [end, share] = [at < 0.5 ? below : above, Math.abs(2 * at - 1)];
    return `rgb(${ground.map((from, n) => Math.round(from + (end[n] - from) * share)).join(" ")})`;
  };
}

const painters = {
  blues, "blues-dark": (at: number) => blues(1 - at),
  viridis: interpolateViridis, cividis: interpolateCividis, magma: interpolateMagma, signed: interpolatePuOr, "signed-dark": signedDark,
  chance: chancePainter(false), "chance-dark": chancePainter(true),
};

/** A scale around a middle: a difference of two maps, or a share against what chance gives. */
export type Signed = boolean | "chance";

/** The colours of differences beside those of weights. */
function signedOf(colours: Colours, signed: Signed = true): keyof typeof painters {
  const name = signed === "chance" ? "chance" : "signed";
  return colours === "blues-dark" ? `${name}-dark` : name;
}

/** Red, green and blue at even steps. */
function table(name: keyof typeof painters): Uint8Array {
  let found = tables.get(name);
  if (!found) {
    found = new Uint8Array(3 * STEPS);
    for (let n = 0; n < STEPS; n++) {
      const text = painters[name](n / (STEPS - 1));
      const parts = text.startsWith("#")
        ? [1, 3, 5].map((at) => parseInt(text.slice(at, at + 2), 16))
        : text.match(/[\d.]+/g)!.map(Number);
      found.set(parts.slice(0, 3), 3 * n);
    }
    tables.set(name, found);
  }
  return found;
}

/** The place of a value on the scale of colours, 0 to 1. */
export function place(value: number, of: Field, scale: Scale): number {
  if (of.signed) return 0.5 + value / of.top / 2;
  const share = value / of.top;
  if (scale === "linear") return Math.min(1, share);
  return share <= 0 ? 0 : Math.min(1, Math.max(0, 1 + Math.log10(share) / DECADES));
}

/** The colour of a place as CSS has it, and whether ink on it is to be white. */
export function colour(at: number, colours: Colours, signed: Signed = false): { fill: string; white: boolean } {
  const parts = table(signed ? signedOf(colours, signed) : colours);
  const n = 3 * Math.round(Math.min(1, Math.max(0, at)) * (STEPS - 1));
  const [red, green, blue] = parts.subarray(n, n + 3);
  const light = [0.2126 * red ** 2.2, 0.7152 * green ** 2.2, 0.0722 * blue ** 2.2].reduce((a, b) => a + b) / 255 ** 2.2;
  return { fill: `rgb(${red} ${green} ${blue})`, white: light < 0.179 }; // at this luminance white and black have the same contrast (WCAG)
}

function picture(of: Field, scale: Scale, colours: Colours): HTMLCanvasElement {
  const canvas = document.createElement("canvas");
  canvas.width = of.columns;
  canvas.height = of.rows;
  const context = canvas.getContext("2d")!;
  const image = context.createImageData(of.columns, of.rows);
  const parts = table(of.signed ? signedOf(colours) : colours);
  for (let n = 0; n < of.values.length; n++) {
    const value = of.values[n];
    if (value !== value) continue; // transparent
    const at = 3 * Math.round(place(value, of, scale) * (STEPS - 1));
    image.data[4 * n] = parts[at];
    image.data[4 * n + 1] = parts[at + 1];
    image.data[4 * n + 2] = parts[at + 2];
    image.data[4 * n + 3] = 255;
  }
  context.putImageData(image, 0, 0);
  return canvas;
}

/** A field in colours, in halves of its size as they are needed. */
export class Pictures {
  private readonly fields: Field[];
  private readonly made: (HTMLCanvasElement | undefined)[] = [];

  constructor(
    of: Field,
    private readonly scale: Scale,
    private readonly colours: Colours,
  ) {
    this.fields = [of];
  }

  /** With at least one pixel of the screen for each bin; `pixels` is how many the whole map has. */
  fit(pixels: number): HTMLCanvasElement {
    const most = Math.max(this.fields[0].rows, this.fields[0].columns);
    let level = 0;
    while (most / 2 ** level > Math.max(1, pixels)) level++;
    while (this.fields.length <= level) this.fields.push(halved(this.fields[this.fields.length - 1]));
    return (this.made[level] ??= picture(this.fields[level], this.scale, this.colours));
  }
}
