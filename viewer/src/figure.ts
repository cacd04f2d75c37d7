// Figures for papers: a view with its title, a scale of colours with numbers, axis titles, tokens and a caption, as PNG or SVG.
// They do not depend on the window, the theme, the pointer or the selection.

import { ticks } from "d3-array";
import { data, type Layer, queryAt, range, token } from "./data";
import { type Colours, coloursOf, colour, DECADES, type Field, Pictures, place, type Scale, type Signed } from "./field";
import { hatch, type Box, CanvasSurface, type Surface, SvgSurface } from "./surface";
import { say } from "./languages";
import { figures as texts, map as mapTexts, percent, whole, local } from "./texts";
import { step } from "./words";

export interface Inks {
  ink: string;
  quiet: string;
  ground: string;
  hidden: string; // masked cells
  lines: string[]; // of the heads in a text
}

const LIGHT: Inks = { ink: "#1c1a20", quiet: "#55505c", ground: "#ffffff", hidden: "#e9e6ec", lines: ["#1f6feb", "#c2410c", "#2c6e3f", "#8b3fa8"] };
const DARK: Inks = { ink: "#eeeaf2", quiet: "#b5aebe", ground: "#1b191f", hidden: "#2b2831", lines: ["#79b0ff", "#ffa366", "#7fce96", "#d59bee"] };

/** What a figure shows, without its frame. `plot` is the part of it that the scale of colours stands beside. */
export interface Body {
  width: number;
  height: number;
  plot: Box;
  draw(surface: Surface, x: number, y: number): void | Promise<void>;
}

/** A scale of colours: its name, and numbers at places from 0 to 1. */
export interface Bar {
  label: string;
  colours: Colours;
  signed: Signed;
  ticks: [number, string][];
}

export interface Figure {
  name: string; // of its file
  title: string;
  caption: string[]; // sentences
  body: Body;
  bar: Bar | null;
}

/** How a figure is drawn: its inks, the palette in that light, and pixels of the picture for each unit. */
export interface Paper {
  inks: Inks;
  dark: boolean;
  ratio: number;
  vector: boolean;
}

export type Kind = "png2" | "png3" | "svg";

export const FONT = "sans-serif";
export const SMALL = 10; // size of labels, in units
const TITLE = 14;
const MARGIN = 12;
const BAR = 14;
const LINE = 14; // of a caption
const MOST_PIXELS = 2 ** 27; // of a canvas: browsers have limits from 2 ** 28

const ruler = document.createElement("canvas").getContext("2d")!;

/** The width of a text in units. */
export function measured(text: string, size = SMALL, bold = false): number {
  ruler.font = `${bold ? "bold " : ""}${size}px ${FONT}`;
  return ruler.measureText(text).width;
}

/** As much of a text as fits a width. */
export function fitted(text: string, room: number): string {
  if (measured(text) <= room) return text;
  const letters = [...text];
  while (letters.length > 1 && measured(`${letters.join("")}…`) > room) letters.pop();
  return `${letters.join("")}…`;
}

/** Lines of at most so many units; a longer word breaks at its dots, or anywhere in a script without spaces. */
export function wrapped(text: string, room: number, size: number, bold = false): string[] {
  const lines = [""];
  for (const word of text.split(/(?<= )/)) {
    const fits = (part: string) => measured(part.trimEnd(), size, bold) <= room;
    const parts = fits(word) ? [word] : word.split(/(?<=[._/])/).flatMap((part) => (fits(part) ? [part] : [...part]));
    for (const part of parts) {
      if (lines[lines.length - 1] && measured((lines[lines.length - 1] + part).trimEnd(), size, bold) > room) lines.push("");
      lines[lines.length - 1] += part;
    }
  }
  return lines.map((line) => line.trimEnd()).filter(Boolean);
}

/** The palette of the page on a light or a dark ground. */
export function coloursOn(colours: Colours, dark: boolean): Colours {
  return coloursOf(colours === "blues-dark" ? "blues" : colours, dark);
}

// ---------------------------------------------------------------- the frame

interface Layout {
  width: number;
  height: number;
  paint(surface: Surface): Promise<void>;
}

function laidOut({ title, caption, body, bar }: Figure, { inks }: Paper): Layout {
  const numbers = bar ? Math.ceil(Math.max(...bar.ticks.map(([, text]) => measured(text)))) : 0;
  const width = Math.ceil(Math.max(280, body.width + (bar ? 10 + BAR + 6 + numbers + 18 : 0)));
  const titles = wrapped(title, width, TITLE, true);
  const captions = wrapped(caption.filter(Boolean).join(" "), width, SMALL);
  const top = MARGIN + titles.length * 18 + 6;
  const high = Math.max(80, body.plot.height); // of the scale
  const below = top + Math.max(body.height, bar ? body.plot.y + high + 4 : 0) + 10;
  return {
    width: width + 2 * MARGIN,
    height: Math.ceil(below + captions.length * LINE + MARGIN - 4),
    async paint(surface) {
      surface.box({ x: 0, y: 0, width: this.width, height: this.height }, inks.ground);
      titles.forEach((line, n) => surface.text(line, MARGIN, MARGIN + 8 + n * 18, { fill: inks.ink, anchor: "start", size: TITLE, bold: true }));
      await body.draw(surface, MARGIN, top);
      if (bar) drawBar(surface, bar, { x: MARGIN + body.width + 10, y: top + body.plot.y, width: BAR, height: high }, inks, numbers);
      captions.forEach((line, n) => surface.text(line, MARGIN, below + 6 + n * LINE, { fill: inks.quiet, anchor: "start", size: SMALL }));
    },
  };
}

const STEPS = 128;

function drawBar(surface: Surface, { label, colours, signed, ticks: marks }: Bar, box: Box, inks: Inks, numbers: number): void {
  const canvas = document.createElement("canvas");
  [canvas.width, canvas.height] = [1, STEPS];
  const context = canvas.getContext("2d")!;
  for (let n = 0; n < STEPS; n++) {
    context.fillStyle = colour(1 - n / (STEPS - 1), colours, signed).fill;
    context.fillRect(0, n, 1, 1);
  }
  surface.image(canvas, { x: 0, y: 0, width: 1, height: STEPS }, box);
  surface.frame(box, inks.quiet, 1);
  const right = box.x + box.width;
  for (const [at, text] of marks) {
    const y = box.y + (1 - at) * box.height;
    surface.box({ x: right, y: y - 0.5, width: 3, height: 1 }, inks.quiet);
    surface.text(text, right + 6, y, { fill: inks.ink, anchor: "start", size: SMALL });
  }
  surface.text(fitted(label, Math.max(160, box.height)), right + 6 + numbers + 10, box.y + box.height / 2, { fill: inks.ink, anchor: "middle", size: SMALL, upright: true });
}

/** Numbers along a scale: its ends, and round ones between them that are not too close to an end. */
export function ticksOf({ top, signed, above }: Pick<Field, "top" | "signed" | "above">, scale: Scale): [number, string][] {
  const last: [number, string] = [1, above ? texts.orMore(tick(top)) : tick(top)];
  if (signed) return [[0, `−${tick(top)}`], [0.5, "0"], last];
  const between = (marks: [number, string][]) => marks.filter(([at]) => at > 0.06 && at < 0.94);
  if (scale === "linear") return [[0, "0"], ...between(ticks(0, top, 5).map((value) => [value / top, tick(value)])), last];
  const tens = Array.from({ length: DECADES + 1 }, (_, n) => 10 ** (Math.floor(Math.log10(top)) - n));
  const at = (value: number) => 1 + Math.log10(value / top) / DECADES;
  return [[0, texts.orLess(tick(top / 10 ** DECADES))], ...between(tens.map((value) => [at(value), tick(value)])), last];
}

/** Two digits, as print has them: "0.25", "9.7 × 10⁻⁵". */
function tick(value: number): string {
  if (value === 0) return "0";
  if (value >= 0.0009995) return local(String(Number(value.toPrecision(2))));
  const [digits, power] = value.toExponential(1).split("e-");
  const raised = [...power].map((each) => "⁰¹²³⁴⁵⁶⁷⁸⁹"[Number(each)]).join("");
  return `${digits === "1.0" ? "" : `${local(digits.replace(/\.0$/, ""))} × `}10⁻${raised}`;
}

// ---------------------------------------------------------------- files

interface Drawn {
  paper: Paper;
  figure: Figure;
}

/** The picture of a figure, drawn once: its blob. */
async function blobOf({ figure, paper }: Drawn): Promise<Blob> {
  const { width, height, paint } = laidOut(figure, paper);
  if (paper.vector) {
    const svg = new SvgSurface(FONT);
    await paint.call({ width, height, paint }, svg);
    return new Blob([svg.written(width, height, figure.title)], { type: "image/svg+xml" });
  }
  const ratio = Math.min(paper.ratio, Math.sqrt(MOST_PIXELS / width / height));
  const canvas = document.createElement("canvas");
  [canvas.width, canvas.height] = [Math.round(width * ratio), Math.round(height * ratio)];
  const context = canvas.getContext("2d")!;
  context.scale(ratio, ratio);
  await paint.call({ width, height, paint }, new CanvasSurface(context, FONT));
  return inUnits(pngOf(canvas), ratio);
}

/** The PNG of a canvas, at once: toBlob waits until the page is idle, up to 7 seconds. */
function pngOf(canvas: HTMLCanvasElement): Blob {
  const encoded = canvas.toDataURL("image/png").split(",")[1];
  if (!encoded) throw new Error(texts.tooLarge); // "data:,"
  return new Blob([Uint8Array.from(atob(encoded), (each) => each.charCodeAt(0))]);
}

const PER_METRE = 96 / 0.0254; // units: 96 in an inch

/** A PNG that states its size in print, so that one of 3× is not larger than one of 2×. */
async function inUnits(png: Blob, ratio: number): Promise<Blob> {
  const chunk = new Uint8Array(21); // length, "pHYs", pixels per metre across and down, unit, checksum
  const view = new DataView(chunk.buffer);
  view.setUint32(0, 9);
  chunk.set([0x70, 0x48, 0x59, 0x73], 4);
  for (const at of [8, 12]) view.setUint32(at, Math.round(PER_METRE * ratio));
  chunk[16] = 1;
  view.setUint32(17, checksum(chunk.subarray(4, 17)));
  return new Blob([png.slice(0, HEADER), chunk, png.slice(HEADER)], { type: "image/png" });
}

const HEADER = 33; // bytes of a PNG's signature and first chunk

/** CRC-32, as PNG has it. */
function checksum(bytes: Uint8Array): number {
  let rest = ~0;
  for (const byte of bytes) {
    rest ^= byte;
    for (let n = 0; n < 8; n++) rest = (rest >>> 1) ^ (rest & 1 ? 0xedb88320 : 0);
  }
  return ~rest >>> 0;
}

/** Draws a figure: `make` returns it for a paper, which may be dark. */
export async function pictured(kind: Kind, dark: boolean, make: (paper: Paper) => Figure | Promise<Figure>): Promise<{ blob: Blob; name: string }> {
  const paper: Paper = { inks: dark ? DARK : LIGHT, dark, ratio: kind === "png2" ? 2 : 3, vector: kind === "svg" };
  const figure = await make(paper);
  return { blob: await blobOf({ figure, paper }), name: `${figure.name}.${kind === "svg" ? "svg" : "png"}` };
}

// ---------------------------------------------------------------- cells

const MOST_RUNS = 64 * 64; // cells of a map that are rectangles in SVG; a larger one is an image, which every program draws as fast

/** The cells of a field in a box, masked ones in grey, of differences hatched. Small maps are rectangles in SVG, so that they stay sharp in any program. */
export function drawCells(surface: Surface, field: Field, scale: Scale, colours: Colours, box: Box, { inks, ratio, vector }: Paper): void {
  surface.box(box, field.signed ? inks.ground : inks.hidden);
  if (field.signed && hasMasked(field)) hatch(surface, box, inks.quiet); // grey is close to small differences
  if (field.values.length === 0) return;
  if (vector && field.values.length <= MOST_RUNS) return drawRuns(surface, field, scale, colours, box);
  const canvas = new Pictures(field, scale, colours).fit(Math.max(box.width, box.height) * ratio);
  surface.image(canvas, { x: 0, y: 0, width: canvas.width, height: canvas.height }, box);
}

/** Neighbours of one colour in a row as one rectangle. */
function drawRuns(surface: Surface, field: Field, scale: Scale, colours: Colours, { x, y, width, height }: Box): void {
  const [across, down] = [width / field.columns, height / field.rows];
  for (let row = 0; row < field.rows; row++) {
    let [from, fill] = [0, ""];
    for (let column = 0; column <= field.columns; column++) {
      const value = column < field.columns ? field.values[row * field.columns + column] : NaN;
      const next = value === value ? colour(place(value, field, scale), colours, field.signed).fill : "";
      if (next === fill && column < field.columns) continue;
      if (fill) surface.box({ x: x + from * across, y: y + row * down, width: (column - from) * across, height: down }, fill);
      [from, fill] = [column, next];
    }
  }
}

export function hasMasked({ values }: Field): boolean {
  return values.some((value) => value !== value);
}

// ---------------------------------------------------------------- axes

/** Positions along an axis, from `start` up to `stop`, and their texts; null where positions have none. */
export interface Axis {
  title: string;
  start: number;
  stop: number;
  text: ((at: number) => string | null) | null;
}

const NEXT = 11; // units between labels of size 10, one below the other
const NUMBERS = 18; // where they are numbers
const NAMES = 92; // units of the longest label
const MOST_NAMED = 200; // positions of which some are labelled by their tokens; the tokens of a longer text say nothing alone

interface Labels {
  all: [number, string][]; // of positions
  room: number; // units that the longest takes
  turned: boolean; // where they are tokens
}

/** The labels of an axis of so many units: every token, or some with their positions, or positions; they never overlap. */
export function labelsOf({ start, stop, text }: Axis, length: number, along: "x" | "y"): Labels {
  const each = length / (stop - start);
  const named = text !== null && stop - start <= MOST_NAMED;
  const turned = named;
  const wide = turned ? NEXT : along === "y" ? NUMBERS : measured(whole(stop - 1)) + 10;
  const every = each >= wide ? 1 : step(wide / each);
  const all: [number, string][] = [];
  for (let at = Math.ceil(start / every) * every; at < stop; at += every) {
    const name = named ? text(at) : null;
    if (name === "") continue;
    all.push([at, name === null ? whole(at) : fitted(every === 1 || data.image ? name : texts.numbered(at, name), NAMES)]);
  }
  return { all, room: turned || along === "y" ? Math.ceil(Math.max(0, ...all.map(([, each]) => measured(each)))) : 12, turned };
}

/** The positions and texts along one axis of a layer's map, between two of its bins. */
export function axisOf(layer: Layer, which: "query" | "key", [from, to]: [number, number], bins: number, singles: boolean): Axis {
  const map = layer.map!;
  if (!map.ranges || from === to) return { title: map.ranges ? mapTexts.axis(which) : mapTexts.axisOfBins(which), start: from, stop: to, text: null };
  const length = layer.lengths![which === "query" ? 0 : 1];
  return { title: mapTexts.axis(which), start: range(from, bins, length)[0], stop: range(to - 1, bins, length)[1], text: singles ? textOf(layer, which) : null };
}

export function textOf(layer: Layer, which: "query" | "key"): (at: number) => string | null {
  return (at) => token(which === "query" ? queryAt(layer, at) : at);
}

/** A plot of so many units with its axes: queries down, keys across. */
export function plotted(columns: Axis, rows: Axis, [wide, high]: [number, number], { inks }: Paper, cells: (surface: Surface, box: Box) => void): Body {
  const [across, down] = [labelsOf(columns, wide, "x"), labelsOf(rows, high, "y")];
  const left = 16 + down.room + 8;
  const plot = { x: left, y: 6, width: wide, height: high };
  return {
    plot, width: left + wide + 4, height: 6 + high + 8 + across.room + 18,
    draw(surface, x, y) {
      const box = { ...plot, x: x + plot.x, y: y + plot.y };
      cells(surface, box);
      surface.frame(box, inks.quiet, 1);
      const label = { fill: inks.ink, size: SMALL } as const;
      for (const [at, text] of down.all) {
        const middle = box.y + ((at - rows.start + 0.5) / (rows.stop - rows.start)) * high;
        surface.box({ x: box.x - 3, y: middle - 0.5, width: 3, height: 1 }, inks.quiet);
        surface.text(text, box.x - 6, middle, { ...label, anchor: "end" });
      }
      for (const [at, text] of across.all) {
        const middle = box.x + ((at - columns.start + 0.5) / (columns.stop - columns.start)) * wide;
        surface.box({ x: middle - 0.5, y: box.y + high, width: 1, height: 3 }, inks.quiet);
        surface.text(text, middle, box.y + high + (across.turned ? 6 : 11), across.turned ? { ...label, anchor: "end", upright: true } : { ...label, anchor: "middle" });
      }
      surface.text(rows.title, x + 6, box.y + high / 2, { ...label, anchor: "middle", upright: true });
      surface.text(columns.title, box.x + wide / 2, y + this.height - 6, { ...label, anchor: "middle" });
    },
  };
}

const SIDE = 448; // units of the longer side of a map, about
const MOST_CELL = 48;

/** The sides of a map, whole units for each cell where they fit, so that cells are equal at every resolution; square where rows and columns are alike. */
export function sidesOf(columns: number, rows: number, named: boolean): [number, number] {
  const most = Math.max(columns, rows);
  const fits = Math.max(1, Math.min(MOST_CELL, Math.floor(SIDE / most)));
  const each = most > 560 ? SIDE / most : named && most * NEXT <= 560 ? Math.max(fits, NEXT) : fits;
  return [Math.max(60, Math.round(each * columns)), Math.max(60, Math.round(each * rows))];
}

// ---------------------------------------------------------------- tables of numbers

/** A table as a picture: names of its rows and columns, and a share in each cell. */
export function tabular(rows: string[], columns: string[], titles: [string, string], value: (row: number, column: number) => number | null, paint: (row: number, column: number) => { fill: string; white: boolean } | null, { inks }: Paper): Body {
  const cell = { width: Math.max(46, Math.min(120, ...[Math.max(...columns.map((each) => measured(each))) + 12])), height: 24 };
  const names = Math.ceil(Math.min(NAMES * 2, Math.max(...rows.map((each) => measured(each)))));
  const left = 16 + names + 8;
  const plot = { x: left, y: 36, width: cell.width * columns.length, height: cell.height * rows.length };
  return {
    plot, width: left + plot.width + 4, height: plot.y + plot.height + 6,
    draw(surface, x, y) {
      const label = { fill: inks.ink, size: SMALL } as const;
      surface.text(titles[0], x + 6, y + plot.y + plot.height / 2, { ...label, anchor: "middle", upright: true });
      surface.text(titles[1], x + left + plot.width / 2, y + 8, { ...label, anchor: "middle" });
      columns.forEach((name, n) => surface.text(fitted(name, cell.width - 4), x + left + (n + 0.5) * cell.width, y + plot.y - 9, { ...label, anchor: "middle" }));
      rows.forEach((name, row) => {
        const top = y + plot.y + row * cell.height;
        surface.text(fitted(name, names), x + left - 6, top + cell.height / 2, { ...label, anchor: "end" });
        columns.forEach((_, column) => {
          const share = value(row, column);
          const box = { x: x + left + column * cell.width, y: top, width: cell.width, height: cell.height };
          const found = share === null ? null : paint(row, column);
          surface.box(box, found?.fill ?? inks.hidden);
          if (share !== null) surface.text(percent(share), box.x + cell.width / 2, top + cell.height / 2, { fill: !found ? inks.ink : found.white ? "#ffffff" : "#000000", anchor: "middle", size: SMALL });
        });
      });
      surface.frame({ ...plot, x: x + plot.x, y: y + plot.y }, inks.quiet, 1);
    },
  };
}

// ---------------------------------------------------------------- captions

/** The sentences that say where weights come from: the model, the input. */
export function origin(): string[] {
  const [model, input] = data.about.map((text) => say(text));
  return [model && texts.model(model), input && texts.input(input)].filter(Boolean);
}
