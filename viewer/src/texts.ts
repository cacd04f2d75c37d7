// Every text that a reader of the page sees, in English. Its translations are language_*.ts; what Python writes into a page is
// translated in phrases.ts. `speak` puts a translation in place of these values, so read them where they are shown, not before.
// {name} in a text marks where the page inserts a part of its own: see `fill`.

import type { ComponentChildren } from "preact";
import type { Degree } from "./naming";

/** A text with parts, such as a bold name, in place of {name}. */
export function fill(text: string, parts: Record<string, ComponentChildren>): ComponentChildren[] {
  return text.split(/\{(\w+)\}/).map((piece, n) => (n % 2 ? parts[piece] : piece));
}

// ---------------------------------------------------------------- numbers

export const NO_VALUE = "–";

export const numbers = {
  locale: "en-US",
  decimal: ".",
  percent: "\u00a0%",
  counted: (count: number, word: Counted) => `${whole(count)} ${plural(count, word)}`,
};

/** What is counted: a name in the code. Each language has its own words for it. */
export type Counted = "head" | "token" | "patch" | "query" | "key" | "step" | "alarm";

export function whole(value: number): string {
  return value.toLocaleString(numbers.locale);
}

/** A number that is written with a point, as the language writes it. */
export function local(written: string): string {
  return numbers.decimal === "." ? written : written.replace(".", numbers.decimal);
}

/** A number with so many decimals. */
export function fixed(value: number, decimals: number): string {
  return local(value.toFixed(decimals));
}

/** Three significant digits, or "–". */
export function figure(value: number | null | undefined, digits = 3): string {
  if (value === null || value === undefined || !Number.isFinite(value)) return NO_VALUE;
  if (value === 0) return "0";
  const size = Math.abs(value);
  if (size >= 1000) return whole(Math.round(value));
  return local(size < 1e-4 ? value.toExponential(digits - 1) : value.toPrecision(digits));
}

/** A share for a sentence: "83 %", "0.9 %", "<0.1 %"; "100 %" only of what rounds to it with one decimal. */
export function percent(share: number): string {
  const value = 100 * share;
  if (value > 0 && value < 0.1) return `<${local("0.1")}${numbers.percent}`;
  const one = value.toFixed(1);
  const long = Math.abs(value) < 9.95 || (value >= 99.5 && Number(one) < 100);
  return `${local(long ? one.replace(/\.0$/, "") : value.toFixed(0))}${numbers.percent}`;
}

/** A value stored in 8 bits: further digits would not be exact. */
export function rough(value: number): string {
  return Number.isFinite(value) ? `≈ ${figure(value, 2)}` : NO_VALUE;
}

function plural(count: number, word: string): string {
  return count === 1 ? word : word === "query" ? "queries" : word === "patch" ? "patches" : `${word}s`;
}

/** "1 token", "2,048 tokens". */
export function counted(count: number, word: Counted): string {
  return numbers.counted(count, word);
}

export const segments = {
  title: "Segments",
  corner: "query in",
  keyIn: "key in",
  fromTo: (from: string, to: string) => `Segments: from “${from}” to “${to}”`,
  headsHint: (from: string, to: string) => `The share of the weight of the tokens of “${from}” that is on the tokens of “${to}”, a mean for each head.`,
  hint: "How much of the weight of a segment's tokens (row) is on the tokens of each segment (column), on average. A row adds up to less than 100 % where keys are in no segment.",
  bands: "Bands along the axes:",
  images: "Attention on the images in the prompt, from",
  selectedToken: (query: string) => `${query} (the selected token)`,
  segmentTokens: (name: string) => `all tokens of “${name}”, on average`,
  imageShare: (name: string, share: string) => `${name}: ${share} of the weight`,
  imageLabel: (name: string) => `${name}: weight on each patch`,
  imageHint: "Each cell is a patch. All images share one colour scale. Click a patch to select it.",
  imagePooled: (keys: number) => `The map pools several tokens in a cell, so it cannot be laid over the patches of the images in the prompt. Record with Observe(map=${keys}) to do so.`,
  patch: (row: number, column: number, weight: string) => `row ${row}, column ${column}: ${weight}`,
  even: (share: string, exact: boolean) => ` even: ${exact ? "" : "≈ "}${share}`,
  evenHint: "even = the share if each token spread its weight evenly over all tokens that it may attend to. ",
  evenTip: (share: string) => `An even spread would give ${share}.`,
  viewEven: (share: string) => `An even spread would give ${share}.`,
  scale: "share, compared with chance",
  below: (points: string) => `${points} points below`,
  above: (points: string) => `${points} points above`,
  within: (clear: boolean) => (clear ? "Grey: the share cannot be told from chance: it is within 3 standard deviations of it, or within 1 %." : "Grey: the share is within a fifth of chance."),
  reads: (to: string, share: string, chance: string) => `{head} reads “${to}” most: ${share} (chance ${chance}).`,
  readsNone: (to: string, share: string, chance: string) => `No head clearly reads “${to}” more than chance. The largest share, ${share} of {head}, cannot be told from chance (${chance}).`,
  readsWithout: (share: string, leads: boolean) => `Without the first token it is ${share}${leads ? ", still the most" : "; {other} then reads it most"}.`,
  readsLess: (to: string) => `No head reads “${to}” more than chance.`,
  counts: (more: number, less: number, of: number) => `Of ${counted(of, "head")}, ${more === 0 ? "" : `${whole(more)} ${more === 1 ? "reads" : "read"} it more than chance, `}${whole(less)} ${more > 0 ? "less" : less === 1 ? "reads it less" : "read it less"}.`,
  without: "without the first token",
  withoutShare: (share: string) => ` without the first token: ${share}`,
  withoutIn: (share: string) => `(${share} without the first token)`,
  withoutHint: "“Without the first token” leaves out the weight on the first token, where many heads put unused weight. The rest is not scaled up.",
  withoutChance: "What chance would give is not known there, so the colour shows the share alone.",
  viewHint: "Each cell is a head: the share of the weight of the first segment's tokens that is on the second one. Click a head to open it.",
  from: "How much do the tokens of",
  to: "attend to",
  tableOf: (head: string) => `Weight between segments of ${head}`,
  allHeads: "All heads",
  layerAndHead: "layer ↓ head →",
  cell: (head: string, share: string) => `${head}: ${share}`,
  firstToken: (name: string) => `Heads named “first” put much of their weight on the first token, which belongs to “${name}”. So the rest of it gets less than their share.`,
  most: (from: string, to: string) => `Most from “${from}” to “${to}”`,
  rows: (count: string, name: string) => `Means over up to ${count} rows of “${name}”.`,
};

export const search = {
  label: "Find a token, a position or a head (press /)",
  placeholder: (word: string, at: string, head: string) => `Find: ${[word, at, head].filter(Boolean).join(", ")}`,
  results: "What fits",
  token: (at: number, around: string) => `${whole(at)}: ${around}`,
  more: (count: number) => `and ${whole(count)} more`,
  inWindow: (window: number, at: number, around: string) => `window ${whole(window)}, token ${whole(at)}: ${around}`,
  merged: "The map merges all windows, so its row stands for these positions in each of them.",
  nth: (n: number, of: number) => `${whole(n)} of ${whole(of)}, Enter: next.`,
  none: "Nothing fits.",
  pattern: (name: string, heads: number, best: string, score: string) => `${name}: ${counted(heads, "head")}, ${heads === 1 ? "" : "highest score "}${best} (${score})`,
  never: (name: string) => `No head is named “${name}”.`,
  unnamed: (name: string, best: string, mean: string) => `No head is named “${name}”. By its mean weight ${best} leads, ${mean} (${tabs.table}).`,
  unscored: (name: string, rows: number, of: number, needs: number, earlier: boolean) => `No score for ${name}: ${whole(rows)} of ${counted(of, "token")} have ${copy(earlier)}, and a score needs ${whole(needs)}.`,
  leads: (best: string, mean: string) => `By its mean weight ${best} leads, ${mean} (${tabs.table}).`,
  beyond: (tokens: number) => `The text has ${counted(tokens, "token")}, counted from 0.`,
  onlyHeads: "Find a head: 3.3",
  steps: "Find: 3.3, step 120",
  noTokens: "Heads only, such as 3.3: the page does not hold one text, token by token.",
};

function copy(earlier: boolean): string {
  return earlier ? "an earlier copy" : "another copy";
}

// ---------------------------------------------------------------- the text with lines

export const reading = {
  title: "Reading",
  hint: "Lines lead from each token to those that it attends to. Click a token to keep its lines.",
  hintAll: (least: string, most: number | null) => `Point at a token to see its weights. Until then: ${largestOrAbove(least, most)}, except on the token itself and on the first one.`,
  largestOfWindows: (windows: number) =>
    `The maps merge ${whole(windows)} windows. Of this one the page holds only the weights that are the largest of their cell over all windows.`,
  window: "Window",
  windowOf: (window: number, length: number) => `${whole(window)} (${counted(length, "token")})`,
  everyOfWindow: (windows: number) => `The maps merge ${whole(windows)} windows. Of this one the page holds q and k of this head: each listed weight is exact, and the page shows how it comes about.`,
  why: (share: string) => `${share}, why?`,
  whyThis: (share: string) => `${share}: why this weight?`,
  heldFor: "Every weight of a token, and why it is as large as it is, can be had for these windows:",
  heldHeads: "Every weight of a token, and why it is as large as it is, can be had for {heads}.",
  noneOfWindow: "The page holds no weight of this token: larger ones in other windows stand for its cells.",
  largestOnly: "The page holds the largest weights of each token only.",
  choose: "Click a token to list the ten tokens that it attends to most, wherever in the text they are.",
  first: "Head",
  add: "Add",
  addOne: "a head…",
  remove: (head: string) => `Remove ${head}`,
  direction: "Lines",
  directions: { from: "attends to", to: "attended to by", both: "both" },
  before: "← Earlier",
  after: "Later →",
  range: (from: number, to: number, length: number) => `Tokens ${whole(from)} to ${whole(to)} of ${whole(length)}`,
  attends: "{head}: {token} ({at}) attends to",
  attendedBy: "{head}: {token} ({at}) is attended to by",
  noneAttends: "No token attends to this one with 0.1\u00a0% of its weight or more, as far as the page holds the weights.",
  missing: (share: string) => `${share} of its weight is not in this page.`,
  noQuery: "This token is not among the queries of this head.",
  goTo: (at: number) => `Go to token ${whole(at)}`,
  at: (at: number) => whole(at),
};

function largestOrAbove(least: string, most: number | null): string {
  return most === null ? `the weights above ${least}` : `the ${whole(most)} largest weights of this part of the text`;
}

/** The table below the text: one token in all heads. */
export const everyHead = {
  label: "The token in all heads",
  title: "{token} ({at}) in all heads: the token that it attends to most. Point at a cell to see the lines of that head.",
  cell: (head: string, key: string, weight: string) => `${head}: ${key}, ${weight}`,
  none: (head: string) => `${head}: this token is not among the queries`,
  always: "The table shows “attends to”, in whichever direction the lines go.",
};

// ---------------------------------------------------------------- the bar on top

export const tabs = { missing: (view: string, shown: string) => `This page has no view “${view}”, which its address names. It shows “${shown}”.`, label: "Views", history: "Training", alarms: (count: number) => `Alarms (${whole(count)})`, heads: "All heads", head: "One head", compare: "Compare", table: "Statistics", found: "Summary", trace: "Step by step", reading: "Reading", segments: "Segments", changes: "Changes" };

export const bar = {
  view: "View",
  language: "Language",
  help: "Help",
  maps: "Maps",
  heads: "Heads",
  page: "Page",
  copyLink: "Copy link",
  copied: "Copied",
  compareWith: "Compare with…",
  compareHelp: "Choose a recording (.safetensors) or another page (.html) of the same model. You can also drop the file onto the page. It stays on this machine.",
};

export const themes = { label: "Theme", auto: "auto", light: "light", dark: "dark" };

export const controls = {
  thumbs: "Thumbnails",
  // with CLS or registers before the patches, those are queries, too
  thumbsMean: (special: number) => (special > 0 ? "mean over all queries" : "mean over all patches"),
  thumbsSelected: "selected patch",
  thumbsMap: "full map",
  overlay: "Overlay on the image",
  pool: "Cells show",
  pools: { mean: "mean", max: "maximum" },
  scale: "Scale",
  scales: { linear: "linear", log: "log" },
  colours: "Colours",
  palettes: { blues: "blues", viridis: "viridis", cividis: "cividis", magma: "magma" },
  hide: (first: FirstColumn) => `Hide ${firstColumns[first]}`,
  hideHelp: (first: FirstColumn) =>
    `${first === "CLS" ? "Many heads park attention on CLS." : "Many heads park attention on the first token."} This option hides the first column and rescales each row, ` +
    "so that the row keeps its sum. The maximum of a cell that pools several weights does not change.",
  sort: "Sort by",
  sortLayer: "layer",
  order: "Order",
  largest: "largest first",
  smallest: "smallest first",
  pattern: "Pattern",
  anyPattern: "any",
  score: "score",
  filter: "Filter",
  anyStatistic: "any statistic",
  atLeast: "at least or at most",
  limit: "limit",
};

export type FirstColumn = "token" | "bin" | "CLS";
const firstColumns: Record<FirstColumn, string> = { token: "first token", bin: "first bin (it holds the first token)", CLS: "CLS" };

// ---------------------------------------------------------------- what to look at first

/** The sentences of the terminal are in src/headscope/report/highlights.py. */
export const cards = {
  title: "What to look at first",
  show: "What to look at first",
  hideLabel: "Hide what to look at first",
  open: "Open this head",
  openCell: "Open this head with this example selected",
  match: (does: string, score: string, degree: Degree) => `${degree && `${degree} `}${does} (${score})`,
  alone: (also: string) => ` (${also.replace(/^; /, "")})`,
  heads: {
    induction: () => "looks like an induction head",
    duplicate: (unit) => `looks at other copies of the same ${unit}`,
    previous: (unit) => `looks at the previous ${unit}`,
    next: (unit) => `looks at the next ${unit}`,
    self: (unit) => `looks at the ${unit} itself`,
  } as Record<string, (unit: string) => string>,
  fixed: (share: string, unit: string) => `puts ${share} of its attention on one ${unit}`,
  region: (region: string, ratio: number) => `looks at ${region} (${ratio.toFixed(1)} × chance)`,
  regions: {
    centre: "the centre of the object", edges: "edges", boundary: "the outline of the object", texture: "texture",
    near: "the nearest patches", far: "the farthest patches",
  } as Record<string, string>,
  example: "{query} → {key}",
  inductionExample: "{query} → {key}, which followed {query} before",
  more: (heads: number) => `${whole(heads)} more ${plural(heads, "head")}`,
  showAll: (heads: number) => `Show only these ${whole(heads)} heads`,
  count: (heads: string, of: string, does: string) => `${heads} of ${of} ${of === "1" ? "head" : "heads"} ${does}`,
  counts: {
    local: (one, unit) => `often ${one ? "looks" : "look"} at nearby ${plural(2, unit)}`,
    first: (one, unit) => `often ${one ? "looks" : "look"} at the first ${unit}`,
    uniform: (one) => `${one ? "comes" : "come"} closest to an even spread`,
  } as Record<string, (one: boolean, unit: string) => string>,
  none: "No head matches a pattern clearly better than chance",
  only: (least: string) => `match of at least ${least} · show only these`,
  all: "show all heads",
};

// ---------------------------------------------------------------- all heads

export const grid = {
  title: "All heads",
  ownScale: (what: "image" | "map", scale: string, largest: number, means: number) => what === "image" ? "Each picture has its own colour scale." : `Rows are queries, columns are keys.${largest === 0 ? (means > 1 ? ` ${legend.pale(means)}` : "") : largest > 1 ? ` Each cell shows its largest weight over ${whole(largest)} windows.` : " Each cell shows its largest weight."} Each map has its own ${scale} colour scale.`,
  click: "Click a head to open it.",
  sorted: (by: string, down: boolean) => `Sorted by ${by}, ${down ? "largest" : "smallest"} first.`,
  noMap: (statistic: string) => `Each tile shows the mean of ${statistic}. No map was recorded; Observe(map=64) records one.`,
  layer: "layer",
  head: "head",
  axes: "Rows of this view are layers, columns are heads. Hover over a number to mark its row or column.",
  layerTip: (name: string) => `All heads of ${name}`,
  headTip: (head: number) => `Head ${head} of every layer`,
  showAll: "Show all",
  matching: (shown: number, all: number) => `${whole(shown)} of ${counted(all, "head")} match the filters.`,
  keys: "Arrow keys move between heads, Enter opens one. The framed head is the one that the tab One head shows.",
  map: "In a map each row is a query and each column a key; the scale of colours tells small weights from large ones.",
  pictures: "A picture shows how much attention each patch receives: from all patches, or from the one that is selected.",
  none: "No head matches these filters.",
  thumb: (name: string, pattern: string, statistic: string) => [name, pattern, statistic].filter(Boolean).join(", "),
  match: (pattern: string, score: number) => `${pattern} ${percent(score)}`,
  /** The name of a head with a match below 50 %. */
  partly: (pattern: string) => `partly ${pattern}`,
  also: (pattern: string, score: string) => `; also ${pattern}, ${score}`,
  region: (region: string, ratio: number) => `${region} × ${ratio.toFixed(1)}`,
  fixedRegion: (region: string) => `fixed keys: ${region}`,
  drawing: (at: number, of: number) => `Drawing head ${whole(at)} of ${whole(of)}`,
};

/** What a small map shows when it is pointed at, and the row of them above a large one. */
export const headTip = {
  strongest: "Strongest: {pair}, {weight}",
  effective: (keys: string) => `Effective keys: ${keys} on average`,
  strip: (layer: string) => `Heads of ${layer}`,
};

export const files = {
  csv: "CSV",
};

// ---------------------------------------------------------------- figures for papers

export const figures = {
  figure: "Figure",
  of: (what: string) => `Figure of ${what}`,
  kinds: { png2: "PNG 2×", png3: "PNG 3×", svg: "SVG" },
  kindHelp: { png2: "For slides and screens", png3: "For print", svg: "Text stays text; sharp at any size" },
  copy: "Copy figure",
  copyHelp: "The PNG of 3×, to paste into a document",
  copied: "Copied",
  notCopied: "The browser does not allow a page to copy pictures here. Save the PNG instead.",
  saved: (name: string) => `Saved ${name}`,
  dark: "on dark ground",
  darkHelp: "By default figures are on white, whatever the theme of the page.",
  tooLarge: "The figure is too large for this browser. Filter the heads, or save SVG.",
  model: (name: string) => `Model: ${name}.`,
  input: (text: string) => `Input: ${text}.`,
  range: (rows: string, row: number, rowStop: number, columns: string, column: number, columnStop: number) =>
    `Rows: ${rows} ${fromTo(row, rowStop)}; columns: ${columns} ${fromTo(column, columnStop)}.`,
  numbered: (at: number, token: string) => `${whole(at)} ${token}`,
  pooledTile: "Each cell pools several pairs of query and key.",
  ofInput: (input: string) => `Weights of ${input}.`,
  scale: (scale: "linear" | "log") => (scale === "linear" ? "Linear colour scale." : "Logarithmic colour scale over four decades."),
  signed: "Orange: B is larger; purple: A is larger.",
  masked: (blank: boolean, broken: boolean) => `${blank ? "Hatched" : "Grey"}: masked${broken ? ", or the row contains NaN or infinity" : ""}.`,
  over: "The colours lie over the image and are mixed with it.",
  rough: "Values are stored in 8 bits.",
  eachMap: "In each map, rows are queries and columns are keys.",
  ownScales: "Each map has its own colour scale.",
  eachPicture: (mean: string) => `In each picture, the colour of a patch is the attention on it: ${mean}.`,
  eachPatch: (patch: string) => `In each picture, the colour of a patch is the weight of ${patch} on it; the frame marks ${patch}.`,
  shareOfLargest: (image: boolean, scale: "linear" | "log") => `share of the largest weight of each ${image ? "picture" : "map"}, ${scale}`,
  shareOfQuantile: (scale: "linear" | "log") => `share of the 99.5 % quantile of each map, ${scale}`,
  heads: (count: number, order: string) => `${counted(count, "head")}${order && `, sorted by ${order}`}`,
  /** What the number in a name such as "induction 83 %" or "edges × 1.8" means. */
  match: (about: string) => [about.includes("%") && "Per cent: match with the pattern, 100 % = exactly it.", about.includes("×") && "× 2: twice as much attention on the region as an even spread."].filter(Boolean).join(" "),
  strips: (from: number, to: number, first: number) =>
    `Columns: queries ${whole(from)}–${whole(to)}; rows: keys by their distance from the query${first > 0 ? `, then the first ${counted(first, "key")}` : ""}.`,
  tokens: (start: number, stop: number) => `Tokens ${fromTo(start, stop)}.`,
  linesOfAll: (least: string, most: number | null) => `Lines: ${largestOrAbove(least, most)}, except on the token itself and on the first one. Wider lines are larger weights.`,
  linesOfOne: (token: string, direction: "from" | "to" | "both", least: string) =>
    `Lines: ${{ from: `what ${token} attends to`, to: `what attends to ${token}`, both: `what ${token} attends to, and what attends to it` }[direction]}, from a weight of ${least}. Wider lines are larger weights.`,
  patches: {
    image: () => "",
    looks: (name: string) => `What ${name} attends to; the frame marks it.`,
    "looked-at": (name: string) => `What attends to ${name}; the frame marks it.`,
    all: () => "Mean over all queries.",
  },
  orLess: (value: string) => `≤ ${value}`,
  orMore: (value: string) => `≥ ${value}`,
  allHeads: "all heads",
  map: (head: string) => `the map of ${head}`,
  strip: "the nearby tokens",
  reading: "the text",
  segmentsOf: (head: string) => `the segments of ${head}`,
  segmentsOfAll: "the segments of all heads",
};

/** A range of positions, the last one included: "8–15". */
export function fromTo(start: number, stop: number): string {
  return stop - start === 1 ? whole(start) : `${whole(start)}–${whole(stop - 1)}`;
}

// ---------------------------------------------------------------- names and places

export type Axis = "query" | "key";

export const names = {
  layer: (short: string) => (/^\d+$/.test(short) ? `layer ${short}` : short),
  head: (layer: string, head: number) => `${layer}, head ${head}`,
  title: (name: string) => name.replace(/^layer /, "Layer "),
  cls: "CLS",
  register: (at: number) => `register ${at}`,
  patch: (row: number, column: number) => `row ${row}, column ${column}`,
  patchShort: (row: number, column: number) => `r${row} c${column}`,
  inQuotes: (token: string) => `“${token}”`,
  quoted: (at: number, token: string) => `${whole(at)} “${token}”`,
  one: (axis: Axis, position: string) => `${axis} ${position}`,
  several: (axis: Axis, start: number, stop: number) => `${plural(2, axis)} ${whole(start)}–${whole(stop)}`,
  bin: (axis: Axis, at: number, of: number) => `${axis} bin ${at} (0–${of - 1})`,
  pair: (query: string, key: string, run: number | null, text: number | null, isWindow: boolean) => {
    const where = [run === null ? "" : isWindow ? `window ${whole(run)}` : `run ${run}`, text === null ? "" : `text ${text}`].filter(Boolean).join(", ");
    return `query ${query} → key ${key}${where && ` (${where})`}`;
  },
  chip: (at: number, token: string, value: string) => `${at}: ${token}${value && `, ${value}`}`,
  firstInput: "the first input of the last call",
  inWindow: (window: number) => `window ${whole(window)}`,
};

/** A token or patch in a caption, for `fill`: "␣on (25)". */
export const NAMED = "{name} ({at})";

// ---------------------------------------------------------------- one head

/** The names of patterns and of regions of an image, by those that the data have. */
export const patternNames: Record<string, string> = {
  previous: "previous", next: "next", self: "self", "fixed key": "fixed key", first: "first", duplicate: "duplicate", induction: "induction", local: "local", uniform: "uniform",
};
export const regionNames: Record<string, string> = {
  centre: "centre", edges: "edges", boundary: "outline", texture: "texture", near: "near", far: "far", layout: "layout", distance_ratio: "distance ratio", layout_r2: "layout R²",
};

/** What a head that matches a pattern does; `unit` is "token" or "patch". */
export const patterns: Record<string, (unit: string) => { kind: string; does: string }> = {
  previous: (unit) => ({ kind: `a previous-${unit} head`, does: `each ${unit} looks at the one just before it.` }),
  next: (unit) => ({ kind: `a next-${unit} head`, does: `each ${unit} looks at the one just after it.` }),
  self: (unit) => ({ kind: `a current-${unit} head`, does: `each ${unit} looks at itself.` }),
  "fixed key": (unit) => ({ kind: "a fixed-key head", does: `each ${unit} looks at the same one, which is not the first.` }),
  first: (unit) => ({ kind: `a first-${unit} head`, does: `each ${unit} looks at the first ${unit}.` }),
  duplicate: () => ({ kind: "a duplicate-token head", does: "it looks at other occurrences of the current token." }),
  induction: () => ({ kind: "an induction head", does: "it looks at the token that came after another occurrence of the current token." }),
  local: (unit) => ({ kind: "a local head", does: `each ${unit} looks at those at most 3 places away.` }),
  uniform: (unit) => ({ kind: "a uniform head", does: `each ${unit} looks evenly at all that it can attend to.` }),
};

export const head = {
  likeness: {
    "": "Looks like {kind} (match {match}, from {rows}): {does}",
    mostly: "Mostly looks like {kind} (match {match}, from {rows}). For the most part: {does}",
    partly: "Partly looks like {kind} (match {match}, from {rows}). In part: {does}",
  },
  noPattern: "No known pattern.",
  unscored: (rows: string, of: string, needs: string, mean: string, earlier: boolean) => `Perhaps {kind}, too: only ${rows} of ${of} tokens have ${copy(earlier)}, and a score needs ${needs}; but ${mean} of their weight is where this pattern looks.`,
  noPatternHelp: "The best match is below 30 %. The statistics list it.",
  likenessHelp: "A pattern describes where a head looks, not what it is for.",
  steps: {
    label: "Head in view",
    up: "previous layer", down: "next layer", left: "previous head", right: "next head",
    keys: "Arrow keys step to another head or layer, Escape leads back to all heads.",
  },
  noMap: "No map was recorded. To see which token attends to which, record with Observe(map=64).",
  notPatches: "The keys of this layer are not the patches of the image.",
  pooledPatches: (keys: number) => `Each cell of this map pools several patches, so the map cannot be laid over the image. Record with Observe(map=${keys}) to do so.`,
  fullMap: "Full map: patches in reading order",
  beside: "Selection and statistics",
  largestKeys: "The largest weights of {token} ({at})",
  largestOthers: "The largest weights of {token} ({at}) without the first token, scaled up as in the map",
  statistics: "Statistics",
  statisticsOf: "Statistics of this head",
  patternMatch: "Pattern match: {list}.",
  matchAndMean: "The statistic of this name in the table is another number: the mean weight itself, which has the share that chance gives, too.",
  patternScale: "100 % = exactly this pattern, 0 % = no closer than chance.",
  about: "about ",
  columns: { query: "per query", mean: "mean", std: "std", min: "min", max: "max", count: "queries" },
  meanings: "What each statistic means",
};

export const strongest = {
  summary: (count: number) => (count === 1 ? "Strongest connection, exact" : `Strongest connections: ${count}, exact`),
  ofCells: (count: number) => `Strongest connections: ${count}, the largest weights of different cells`,
  keys: (each: number) => (each === 1 ? "Strongest key of query {query} {token}" : "Strongest keys of query {query} {token}"),
  queryLabel: "Query",
  key: "{weight} key {key}",
  cells: (exact: boolean, pool: "mean" | "max") => (exact ? "The strongest weights." : `The cells with the largest ${pools[pool]}.`),
  zoomForTokens: "Zoom in to see the tokens.",
};

const pools = { mean: "mean", max: "maximum" };

export const selected = {
  title: "Selected",
  token: "Selected token: {token}",
  patch: "Selected patch: {token}",
  none: (tokens: boolean) => (tokens ? "Click a cell or a token to select it." : "Click a cell to select it."),
  noneHelp: "The row of a cell is what a query attends to; its column is what attends to a key.",
  clear: "Clear",
  clearLabel: "Clear the selection",
  attends: (many: boolean) => (many ? "{name} attend to" : "{name} attends to"),
  attended: (many: boolean) => (many ? "{name} are attended to by" : "{name} is attended to by"),
  attendsToNone: "Attends to",
  attendedByNone: "Attended to by",
  hint: "Hover over a token to preview it. Click any token or cell to change the selection.",
  pooledHint: "Colours are those of the cells that hold the tokens.",
};

// ---------------------------------------------------------------- why this weight

/** A number with its sign, for a sum. */
function signed(value: number): string {
  return `${value < 0 ? "−" : "+"}${four(Math.abs(value))}`;
}

/** A number behind an operator: a negative one in parentheses. */
function operand(value: number): string {
  return value < 0 ? `(${negative(value)})` : four(value);
}

function negative(value: number): string {
  return value < 0 ? `−${four(-value)}` : four(value);
}

const MOST_DECIMALS = 8;

/** The fewest decimals, from three on, with which an equation holds as it is printed; those that leave four digits if none do. */
function decimalsOf(holds: (rounded: (value: number) => number) => boolean): number | null {
  for (let decimals = 3; decimals <= MOST_DECIMALS; decimals++) {
    const rounded = (value: number) => Number(value.toFixed(decimals));
    if (holds(rounded)) return decimals;
  }
  return null;
}

const equal = (one: number, other: number) => Math.abs(one - other) < 1e-9 * Math.max(1, Math.abs(other));

/** Writes numbers with so many decimals, with a minus sign; behind an operator a negative one is in parentheses. */
function written(value: number, decimals: number | null, behind = false): string {
  if (decimals === null) return behind ? operand(value) : negative(value);
  const text = (Number(value.toFixed(decimals)) < 0 ? "−" : "") + fixed(Math.abs(value), decimals);
  return behind && text.startsWith("−") ? `(${text})` : text;
}

/** "exp(12.544 − 13.556) = exp(−1.012)", with digits enough that both sides are the same, and are the weight. */
export function exponent(logit: number, lse: number, p: number): string {
  const decimals = decimalsOf((of) => equal(of(of(logit) - of(lse)), of(logit - lse)) && figure(Math.exp(of(logit - lse))) === figure(p));
  return `exp(${written(logit, decimals)} − ${written(lse, decimals, true)}) = exp(${written(logit - lse, decimals)})`;
}

/** "a + b = c", with digits enough that it holds as it is printed. */
export function sum(a: number, b: number, c: number): string {
  const decimals = decimalsOf((of) => equal(of(of(a) + of(b)), of(c)));
  return `${written(a, decimals)} + ${written(b, decimals, true)} = ${written(c, decimals)}`;
}

/** "a × b = c": the factors have digits enough that the product has the three decimals that are printed. */
export function product(a: number, b: number, c: number): string {
  const decimals = decimalsOf((of) => equal(Number((of(a) * of(b)).toFixed(3)), Number(c.toFixed(3))));
  return `${written(a, decimals)} × ${written(b, decimals, true)} = ${written(c, decimals && 3)}`;
}

/** Four digits: the reader may compute the next line from this one. */
function four(value: number): string {
  return figure(value, 4);
}

export const reason = {
  title: "Why this weight?",
  choose: "Select one cell of the map to see how its weight is computed. Zoom in first if a cell covers several tokens.",
  absent: "This page does not hold q and k of this head. Record them: headscope watch --keep-qk, or Observe(keep_qk=True). Then make the page: headscope report --exact LAYER.HEAD.",
  served: "A page from a server does not hold q and k. A saved page shows how a weight is computed: recording.save_html(path, exact=[(layer, head)]).",
  others: "This page can compute the weights of {heads}.",
  largestIn: (window: number) => `The largest weight of this cell is in window ${whole(window)}.`,
  elsewhere: (window: number) => `The largest weight of this cell is in window ${whole(window)}, whose q and k this page does not hold. The page explains the largest weight of the same cell in these windows:`,
  chooseInWindows: "Select a cell of the map to see how its largest weight is computed. Single weights can be had for these windows:",
  goToWindow: (window: number) => `Go to window ${whole(window)}`,
  pair: "{query} → {key}",
  of: (input: string) => ` (${input})`,
  product: "Query times key: how well the two match",
  dot: (value: number) => `q · k = ${negative(value)}`,
  parts: (shown: number, of: number) => (shown < of ? `The ${shown} largest of ${of} dimensions:` : `The ${of} dimensions:`),
  dimension: (d: number) => `dim ${d}`,
  part: signed,
  partTitle: (d: number, q: number, k: number, value: number) => `dimension ${d}: q ${negative(q)} × k ${operand(k)} = ${negative(value)}`,
  rest: (count: number, value: number) => `the other ${count === 1 ? "dimension" : `${count} dimensions`} together: ${signed(value)}`,
  scaled: "Times the scale, so that logits stay small",
  scale: (dot: number, scale: number, value: number) => product(dot, scale, value),
  capped: "Softcap: large values are bent towards the cap",
  cap: (cap: number, scaled: number, value: number) => `${four(cap)} · tanh(${negative(scaled)} / ${four(cap)}) = ${negative(value)}`,
  biased: "Plus the bias of this pair",
  bias: (before: number, bias: number, value: number) => sum(before, bias, value),
  maskedTitle: "Mask",
  masked: "The mask hides this key from this query. Its weight is 0, whatever q · k is.",
  visible: "The mask lets this query attend to this key.",
  noMask: "There is none: every query may attend to every key.",
  lseTitle: "lse: the logarithm of the sum of exp(logit) over all keys that the query may attend to. A logit near it gets most of the weight.",
  ends: {
    self: "The key is the query token itself.",
    induction: "This key followed an earlier copy of the query token: it is the target of an induction head.",
    previous: "The key is the previous token.",
    first: "The key is the first token of the text.",
  },
  lse: (value: number) => `lse = ${negative(value)}`,
  weightTitle: "The weight: exp(logit − lse)",
  weight: (logit: number, lse: number, p: number) => `${exponent(logit, lse, p)} = ${figure(p)} (${percent(p)})`,
  rival: (p: number) => `Against {other}, the largest other key of this query (${percent(p)})`,
  decides: (sum: number) => `q · k of {selected} is ${four(Math.abs(sum))} ${sum < 0 ? "smaller" : "larger"} than of {other}`,
  rivalTitle: (d: number, q: number, k: number, other: number, value: number) => `dimension ${d}: q ${negative(q)} × (k ${operand(k)} − ${operand(other)}) = ${negative(value)}`,
  noWeights: "This query has no weights: its row contains NaN or infinity, or its logits are too large for their precision.",
  failed: (why: string) => `The page could not compute this weight: ${why}`,
  stored: (kind: string, bits: number, error: number) =>
    error === 0 && kind.includes("float")
      ? `q and k are in the page as the recording has them (${kind}).`
      : `q and k are in the page in ${bits} bits: a weight differs from the model's by at most ${figure(100 * error, 2)}\u00a0% of itself.`,
};

// ---------------------------------------------------------------- pictures in words

/** What a picture shows, for readers who do not see it. */
export const described = {
  size: (queries: number, keys: number) => `${whole(queries)} × ${whole(keys)} weights`,
  pooled: (rows: number, columns: number, queries: number, keys: number) => `${whole(queries)} × ${whole(keys)} weights in ${whole(rows)} × ${whole(columns)} cells`,
  bins: (rows: number, columns: number) => `${whole(rows)} × ${whole(columns)} cells`,
  likeness: (kind: string, match: string, degree: Degree) => `${degree && `${degree} `}looks like ${kind} (${match})`,
  noPattern: "no known pattern",
  strongest: (pairs: string) => `strongest: ${pairs}`,
  pair: (query: string, key: string, weight: string) => `${query} to ${key}, ${weight}`,
  selfPair: (token: string, weight: string) => `${token} to itself, ${weight}`,
  token: (token: string, at: string) => `‘${token}’ (${at})`,
  first: (share: string, first: FirstColumn) => `on average ${share} of the weight is on ${{ token: "the first token", bin: "the first bin", CLS: "CLS" }[first]}`,
  difference: (pairs: string) => `largest differences: ${pairs}`,
  selected: (cell: string) => `Selected: ${cell}.`,
  empty: "no weights",
  strip: (pairs: string) => `Strongest: ${pairs}.`,
  image: (rows: number, columns: number) => `An image of ${rows} × ${columns} patches.`,
  colourBar: (what: string, low: string, high: string) => `Colour scale, ${what}: from ${low} to ${high}`,
  join: (title: string, parts: string[]) => `${title}: ${parts.join("; ")}.`,
  also: "; ",
};

// ---------------------------------------------------------------- help, tour and glossary

export const help = {
  title: "Help",
  close: "Close",
  keysTitle: "Keys",
  keys: [
    ["?", "open this help"],
    ["/", "find a token, a position or a head"],
    ["Tab", "go to the next part of the page"],
    ["← ↑ ↓ →", "all heads, tabs, tokens: go to a neighbour"],
    ["Enter", "open the head, or select the token"],
    ["← ↑ ↓ →", "one head: the next head or layer"],
    ["Shift + ← ↑ ↓ →", "on the map: move the selected cell"],
    ["+ − 0", "on the map: zoom in, zoom out, show all"],
    ["Esc", "close, clear the selection, or go back to all heads"],
  ] as [string, string][],
  page: "This page",
  takeTour: "Take the tour (20 seconds)",
  glossary: "Glossary",
};

export const tour = {
  label: "Tour",
  step: (at: number, of: number) => `${at} of ${of}`,
  next: "Next",
  back: "Back",
  done: "Done",
  leave: "Leave the tour",
  steps: {
    changes: "Two recordings: the heads that moved, the largest change first. A click opens a head in A, in B, and their difference.",
    happened: "What to look at first: the first alarms. A click shows the head at the step of its alarm.",
    steps: "The whole training: each row is a head, each column a step. Marks are alarms.",
    slider: "Select a step with the slider, or with the arrow keys left and right.",
    step: "All heads at the selected step, and the curves of the selected head.",
    findStep: "Find a head or a step. The key / leads here, ? opens the help with a glossary.",
    cards: "What to look at first: the heads that stand out, each in one sentence. A click opens the head with an example selected.",
    grid: "All heads: a small map for each. Rows are layers, columns are heads. Dark cells are strong attention, or bright ones on a dark page.",
    map: "One head: each row is a token that looks, each column a token that it looks at. Point at a cell to read its weight; click to select it.",
    pictures: "One head: what the selected patch attends to, what attends to it, and the average. Click a patch to select it.",
    beside: "Here is what the selected token attends to, why, and the statistics of the head.",
    reading: "Reading: the text itself. Lines lead from each token to those that it attends to.",
    find: "Find a token, a position or a head. The key / leads here, ? opens the help with keys and a glossary.",
  },
};

export const glossary = {
  title: "Glossary",
  back: "All terms",
  hint: "Each picture is a map of eight tokens: a row for each query, a column for each key. Cells with a mark get the weight.",
  open: (name: string) => `${name}: what it means`,
  patterns: "Patterns",
  statistics: "Statistics",
  words: "Words",
  example: (letters: string) => `Tokens in the picture: ${letters}`,
  picture: (name: string, does: string) => `Map of the pattern ${name}: ${does}`,
  entries: {
    previous: "Each token looks at the one just before it.",
    next: "Each token looks at the one just after it. Only a model that may read ahead can do so.",
    self: "Each token looks at itself.",
    duplicate: "Each token looks at earlier copies of itself.",
    induction: "Each token looks at what followed its earlier copy. So the model can continue a text that it has read before.",
    "fixed key": "Every token looks at the same one, such as a full stop or [SEP], wherever it is.",
    first: "Every token looks at the first one. Many heads put attention there that they have no use for: an attention sink.",
    local: "Each token looks evenly at its neighbours, at most 3 places away.",
    uniform: "Each token looks evenly at all tokens that it may attend to.",
  } as Record<string, string>,
  terms: {
    attention: ["attention", "A token reads from other tokens. Its weights say how much from each, and add up to 1."],
    head: ["head", "One way of choosing what to read. A layer has several heads, which work side by side."],
    query: ["query", "The token that reads: a row of the map."],
    key: ["key", "A token that can be read: a column of the map."],
    weight: ["weight", "The share of a query's attention on a key, from 0 to 1."],
    mask: ["mask", "Which keys a query may attend to. A causal mask hides all later tokens."],
    softmax: ["softmax", "The function that turns the scores of a query into weights."],
    match: ["match", "How closely a head follows a pattern: 100 % = exactly, 0 % = no closer than chance. Below 50 % the name says “partly”."],
  } as Record<string, [string, string]>,
  units: {
    entropy: "nats", normalized_entropy: "0 to 1", max_weight: "0 to 1", effective_keys: "keys", mass: "0 to 1", distance: "positions or patches", previous: "0 to 1", next: "0 to 1",
    self: "0 to 1", duplicate: "0 to 1", induction: "0 to 1", first: "0 to 1", lse: "a logarithm", max_logit: "a logit", chance: "0 to 1", value_norm: "a length", second_weight: "0 to 1",
    recall: "0 to 1", recall_kl: "nats", largest_selected: "0 or 1",
  } as Record<string, string>,
  unit: (unit: string) => `Unit: ${unit}.`,
  received: ["attention received", "The mean weight that a key gets from the queries that may attend to it: the bars above the map."] as [string, string],
};

// ---------------------------------------------------------------- the map

export const map = {
  keys: "Shift and arrow keys move the selection, plus and minus zoom, 0 shows all.",
  zoomIn: "Zoom in",
  zoomOut: "Zoom out",
  reset: "Show all",
  sight: (exact: boolean, queries: [number, number], keys: [number, number], of: string) =>
    `${exact ? "Exact: each visible cell is one weight" : "Computed for this zoom; each cell pools several weights"}: queries ${whole(queries[0])}–${whole(queries[1] - 1)}, ` +
    `keys ${whole(keys[0])}–${whole(keys[1] - 1)}${of && ` of ${of}`}.`,
  axis: (axis: Axis) => axis,
  axisOfLast: (axis: Axis) => `${axis} of the last call`,
  axisOfWindow: (axis: Axis, window: number) => `${axis} of window ${whole(window)}`,
  axisOfBins: (axis: Axis) => `${axis} bin`,
  // The page shows the longest that fits.
  received: (most: string) => [`attention received (avg per query, max ${most})`, `received per query (max ${most})`, `received ≤ ${most}`],
  entropy: (most: string) => [`entropy per query (max ${most})`, `entropy (max ${most})`, `entropy ≤ ${most}`],
};

export const cell = {
  arrow: "{query} → {key}",
  masked: (broken: boolean) => `{where}: masked${broken ? ", or the row contains NaN or infinity" : ""}`,
  maskedTile: "masked",
  weight: "weight {weight}",
  exactWeight: "weight {weight}, exact",
  pooled: "mean {mean}, max {max}",
  pooledAt: "mean {mean}, max {max} at {at}",
  difference: (value: string) => `difference of the two heads ${value}`,
  hidden: "in the hidden first column",
  rescaled: (value: string) => `with the first column hidden ${value}`,
};

export const legend = {
  what: (kind: "difference" | "weight" | "mean" | "max", scale: "linear" | "log") =>
    `${{ difference: "difference", weight: "weight", mean: "mean weight of a cell", max: "maximum of a cell" }[kind]}, ${scale}`,
  largestOf: (windows: number, scale: "linear" | "log") => `largest weight over ${whole(windows)} windows, ${scale}`,
  pale: (windows: number) => `A dark cell is dark on average over ${whole(windows)} windows. Weight that is elsewhere in each of them is pale; “${controls.pools.max}” (View, Maps) shows it.`,
  dark: (windows: number) => `A dark cell has a large weight in at least one of ${whole(windows)} windows; its mean may be small.`,
  meanOf: (windows: number, scale: "linear" | "log") => `mean weight over ${whole(windows)} windows, ${scale}`,
  atMost: (value: string) => `≤ ${value}`,
  orMore: (value: string) => `${value} or more`,
  linearAlone: "This scale is linear, those of A and B are logarithmic: a difference of small weights is pale here.",
  visiblePart: "The colour scale is that of the visible part.",
  quantile: "The scale ends at the 99.5 % quantile.",
  pixel: "A pixel that holds several cells shows the largest one.",
  bits: (bits: number, codes: number) =>
    `Stored in ${bits} bits: value = largest × (c / ${whole(codes)})², with an error of at most ${(1 / codes).toPrecision(1)} of the largest.`,
  rough: "Values with ≈ are stored in 8 bits.",
  coarse: (levels: number) => `Values with ≈ are within ${percent(1 / levels)} of the largest of their row: so many weights take too many bytes.`,
  levels: (levels: number) => `Stored in ${levels + 1} levels: value = largest of its row × (c / ${levels})².`,
  noDetail: "Zooming in adds no detail.",
  oneWeight: "Each cell is one weight.",
  aloneHelp: (window: number) => `Only window ${whole(window)}, from q and k in this page`,
  /** `over` is what `inputs` or `windows` returns, or "". */
  proportional: (pool: "mean" | "max", rows: number, columns: number, over: string) =>
    `Each cell ${over ? `is its ${pool === "max" ? "largest" : "mean"} weight${over}` : `${pool === "max" ? "is the largest weight" : "averages the weights"} of calls`} of different lengths: ${rows} × ${columns} bins, each an equal share of the length.`,
  onePair: (pool: "mean" | "max", over: string) => `Each cell is one query and key${over && `: its ${pool === "max" ? "largest" : "mean"} weight${over}`}.`,
  pairs: (pool: "mean" | "max", queries: string, keys: string, over: string) =>
    `Each cell ${pool === "max" ? "is the maximum of" : "averages"} ${queries} × ${keys} pairs of query and key${over}.`,
  inputs: (count: number) => `, pooled over ${whole(count)} inputs`,
  windows: (count: number) => `, merged over ${whole(count)} windows`,
  sink: (first: FirstColumn, rescaled: boolean) =>
    `Without the ${firstColumns[first]}${rescaled ? ": the other weights of each row are scaled up, so that the row keeps its sum." : ". The other cells are unchanged."}`.replace("the CLS", "CLS"),
  between: (least: number, most: number) => `${least}–${most}`,
};

export const server = { stopped: "The server has stopped. Start it again, then reload this page." };

// ---------------------------------------------------------------- an image

export const image = {
  titles: { image: "Image", looks: "What the selected patch attends to", "looked-at": "What attends to the selected patch", all: "Average" },
  label: (title: string, head: string, shown: string) => `${title}, ${head}. ${shown} Arrow keys select a patch.`,
  original: "Image. Click a patch to select it, or use the arrow keys.",
  looks: "Where the framed {name} attends. {most}",
  lookedAt: "Which patches attend to the framed {name}. {most}",
  mostOf: (patch: string, weight: string) => `Most: ${patch}, ${weight}, where the colour scale ends.`,
  patchNamed: (place: string) => `patch ${place}`,
  shownOf: { received: "Each picture shows how much attention each patch receives, on average over all queries.", patch: (name: string) => `Each picture shows where ${name} (framed) attends.`, map: "Rows are queries, columns are keys, patches in reading order." },
  first: "Image. The frame marks the selected query, {name}. Click another patch to select it.",
  firstHead: "Head {head}: where the framed {name} attends. The more orange, the more attention. {most}",
  firstMost: "Most: {key} ({share}).",
  firstTitle: (name: string, head: string) => `Where ${name} attends in head ${head}`,
  average: (special: number) => (special > 0 ? "Mean over all queries, CLS and registers included. {most}" : "Mean over all patches. {most}"),
  most: (patch: string, weight: string, ratio: number) => `Most: ${patch}, ${weight}, ${ratio.toFixed(1)} × an even spread.`,
  noWeight: "No patch has a weight here: all are masked, or the row contains NaN or infinity.",
  pair: (query: string, key: string, weight: string) => `${query} → ${key}: ${weight}`,
  averageOf: (key: string, weight: string) => `mean → ${key}: ${weight}`,
  hover: "Hover over a patch to read its weight.",
  special: "Before the patches: {buttons} {weights}",
  itself: "selected, on itself",
  seeSpecial: "Select it to see what it attends to",
  specialWeights: (name: string, special: number) =>
    `The number is the weight that ${name} puts on ${special === 1 ? "it" : "each"}. The colour scales leave ${special === 1 ? "it" : "them"} out.`,
  scale: "Each picture has its own colour scale, from 0 to its largest patch.",
  outline: "The line is the outline of the object.",
  regions: "What it looks at",
  mostRegion: (ratio: number) => `Looks at {region} (${ratio.toFixed(1)} × chance): ${ratio.toFixed(1)} times as much as an even spread.`,
  fixedRegion: (ratio: number) => `Fixed keys: all patches attend to nearly the same patches, whatever they show. Of the regions, {region} has most: ${ratio.toFixed(1)} times as much as an even spread.`,
  noRegion: "Looks at none of the regions much more than an even spread does.",
  ratio: (ratio: number) => `× ${ratio.toFixed(2)}`,
  even: "The line marks × 1, an even spread. Regions overlap.",
};

// ---------------------------------------------------------------- nearby tokens

export const strips = {
  title: "Nearby tokens",
  distance: "distance of the key",
  missing: (others: string[]) =>
    `The page holds nearby tokens at full resolution for at most 16 heads, and not for this one.${others.length > 0 ? ` In this layer it holds ${others.length === 1 ? "head" : "heads"} ${others.join(", ")}.` : ""}`,
  label: (head: string, first: number, last: number) => `Nearby tokens of ${head}, queries ${first} to ${last}`,
  keys: (label: string) => `${label}. Arrow keys move to a weight.`,
  from: "Queries from",
  first: "First query",
  count: "Queries shown",
  self: "itself",
  away: (by: number) => `${by < 0 ? "−" : "+"}${Math.abs(by)}`,
  key: (at: number) => `key ${at}`,
  scale: "All heads share this colour scale.",
  of: (input: string) => `These are weights of ${input}.`,
  hint: (low: number, high: number, first: number) =>
    `Each column is a query. Rows are keys ${high > 0 ? `from ${-low} tokens before it to ${high} after` : `0–${-low} tokens back`}, then the first ${first === 1 ? "key" : `${first} keys`}. Weights are stored in 8 bits.`,
  weight: (query: string, key: string | null, weight: string | null) =>
    `query ${query} → ${key === null ? "no key at this distance" : `key ${key}: ${weight ?? "masked"}`}`,
};

// ---------------------------------------------------------------- compare, statistics, steps

export const compare = {
  title: "Two heads",
  a: "Head A",
  b: "Head B",
  difference: "Difference (B − A)",
  differenceOf: (a: string, b: string) => `${b} − ${a}`,
  unlike: "The maps of A and B have different bins, so they have no difference.",
  statistics: "Statistics of both heads",
  columns: { mean: "mean over queries", a: "A", b: "B", difference: "B − A" },
};

/** On a page of two recordings: which one a view shows. */
export const whose = {
  shows: "This view shows",
  unlike: "B has other heads, lengths or maps, so this view shows A only. Make a page of B alone: headscope report B.",
  title: "Two heads, of A and B or both of A",
  group: (side: string, name: string) => (side === name ? side : `${side}: ${name}`),
  within: "second − first",
  scales: "Second − first: orange is more attention in the second head, purple is less. Both maps are of A, and share one colour scale.",
  columns: { a: "first", b: "second" },
};

export const table = {
  title: "Statistics of all heads",
  hint: "Each value is a mean over the queries that have the statistic. Entropies are in nats. Click a heading to sort.",
  head: "head",
  pattern: "pattern",
  score: "score",
  scoreMeaning: "How closely the map matches its best pattern: 1 = exactly, 0 = no closer than chance.",
};

export const trace = {
  title: "Step by step",
  hint: "One forward pass of multi-head attention. Values are the first ones of the first batch entry and head.",
  oneLayer: "A trace is of one module, so the page holds the steps of this layer only. headscope.trace(module, x) records those of another one.",
  size: (letter: string, size: number) => `${letter} = ${size}`,
  mistake: "Common mistake.",
  here: "Here.",
  unusual: "unusual", // the first word of such a note
};

// ---------------------------------------------------------------- two recordings

/** "3", "1 and 3", "1, 2 and 3". */
function listed(names: string[]): string {
  return names.length < 2 ? names.join("") : `${names.slice(0, -1).join(", ")} and ${names[names.length - 1]}`;
}

const moves = (count: number) => (count === 1 ? "head moved" : "heads moved");

/** A least and a largest number: "3", or "3–5". */
export function span([least, most]: readonly [number, number]): string {
  return least === most ? whole(least) : `${whole(least)}–${whole(most)}`;
}

/** A difference with its sign; what is 0 or unknown has none. */
export function withSign(value: string): string {
  if (/^(≈ )?(0|–)$/.test(value)) return value;
  return value.includes("-") && !/^(≈ )?\d/.test(value) ? value.replace("-", "−") : `+${value}`;
}

/** The smallest changes that count, by their units. */
export type Limits = Record<"share" | "nats" | "logits" | "ratio" | "errors" | "map" | "received", number>;

export const changes = {
  title: "What changed from A to B",
  thisPage: "this page",
  sides: "A: {a}. B: {b}.",
  summary: (moved: number, of: number, layers: string[]) =>
    `${whole(moved)} of ${whole(of)} ${moves(of)}${layers.length === 0 ? "" : layers.length === 1 ? `${moved === 1 ? "" : ", all"} in layer ${layers[0]}` : layers.length <= 4 ? `, in layers ${listed(layers)}` : `, in ${layers.length} layers`}.`,
  most: "Most: {head} ({change}).",
  none: (of: number) => `None of the ${whole(of)} heads moved.`,
  largest: "The largest change is that of {head} ({change}): {size} of its threshold.",
  hint: "Click a head to open it.",
  limits: ({ share, nats, logits, ratio, map, errors }: Limits) =>
    `Moved: a share changed by ${whole(100 * share)} percentage points, entropy by ${figure(nats, 2)} nats, a number of keys, a distance or the value norm by × ${figure(ratio)}, a logit by ${whole(logits)}, or ${percent(map)} of the attention is elsewhere; and by ${whole(errors)} standard errors.`,
  sharper: (change: string) => `sharper: ${change}`,
  broader: (change: string) => `broader: ${change}`,
  only: "Only heads that moved",
  showMore: (count: number) => `Show ${whole(count)} more`,
  shown: (shown: number, of: number) => `${whole(shown)} of ${counted(of, "head")}`,
  a: "A",
  b: "B",
  difference: "B − A",
  differenceOf: (head: string) => `${head}: B − A`,
  sideOf: (side: string, name: string) => (side === name ? side : `${side}: ${name}`),
  scales: "B − A: orange is more attention in B, purple is less. A and B share one colour scale.",
  mapScale: (scale: "linear" | "log") => (scale === "log" ? "The scale of A and B is logarithmic over four decades, that of B − A is linear." : "All scales are linear."),
  change: (name: string, before: string, after: string) => `${name} ${before} → ${after}`,
  mapChange: (share: string) => `map: ${share} of the attention is elsewhere`,
  receivedChange: (share: string) => `received: ${share} goes to other tokens`,
  brokenChange: (before: number, after: number) => `rows with NaN or infinity ${whole(before)} → ${whole(after)}`,
  moved: "moved",
  valuesOnly: "only the value norm, not the attention",
  still: "did not move",
  label: (head: string, moved: boolean, what: string) => `${head}, ${moved ? "moved" : "did not move"}${what && `: ${what}`}`,
  back: "← All changes",
  nearby: "Heads in this list",
  previous: "previous head of the list",
  next: "next head of the list",
  at: (at: number, of: number) => `${whole(at)} of ${whole(of)}`,
  statistics: "Statistics of this head in A and B",
  columns: { name: "mean over queries", before: "A", after: "B", change: "B − A", size: "× threshold" },
  map: "map: share of the attention that is elsewhere",
  received: "received: share that goes to other tokens",
  broken: "rows with NaN or infinity",
  notMoved: "less than 3 standard errors",
  sizeHelp: "The change in thresholds. From 1 on, the head has moved, if the change is also larger than three standard errors.",
  noDifference: "The maps of A and B have different sizes, so there is no difference map. Compare recordings of the same length.",
  noMaps: "No maps were recorded, so only statistics are compared. Record with Observe(map=64) to see maps.",
  csv: "CSV",
  signed: (value: string) => withSign(value),
  segment: (query: string, key: string) => `${query} → ${key}`,
  layer: (name: string) => `layer ${name}`,
  heads: (layer: string, more: number) => `${counted(more, "head")} of layer ${layer}`,
  different: (what: "runs" | "lookedAt" | "keys" | "first" | "bins", [a, b]: (readonly [number, number])[]) =>
    `Different ${{ runs: "numbers of forward passes", lookedAt: "numbers of measured queries", keys: "lengths", first: "numbers of first keys", bins: "numbers of bins of the maps" }[what]}: ${span(a)} in A, ${span(b)} in B.`,
  unlikeMaps: (all: boolean) => `${all ? "The" : "Some"} maps of A and B have different sizes, so ${all ? "only statistics are compared" : "they are not compared"}.`,
  rough: "Maps are stored in 8 bits, so the share of the attention that is elsewhere may be off by up to 2 percentage points.",
  otherCells: "So a cell covers another number of tokens in B, and its mean weight differs for that reason, too.",
  otherSample: "Maps are not compared where A and B measured different shares of the queries.",
  otherSegments: "The segments have different names, so they are not compared.",
  noSpread: "A page of a single text does not hold the spread of the rows, so every change above its threshold counts.",
  onlyIn: (side: "A" | "B", names: string[]) => `Only in ${side}: ${names.join(", ")}.`,
  unchecked: (which: "A" | "B" | "AB") => `${which === "AB" ? "A and B do" : `${which} does`} not state the model, so headscope cannot check that they belong together.`,
  otherModel: (a: string, b: string, same: boolean) => `These recordings are of different models: ${a} and ${b}${same ? " with another configuration" : ""}. Compare recordings of one architecture.`,
  otherHeads: (layer: string, a: number, b: number) => `Layer ${layer} has ${a === b ? "another part of the heads" : `${whole(a)} heads here and ${whole(b)}`} in the other recording. Compare recordings of one architecture.`,
  otherWidths: (layer: string, a: number, b: number) => `The heads of layer ${layer} have ${whole(a)} dimensions here and ${whole(b)} in the other recording. Compare recordings of one architecture.`,
  noLayers: (a: string, b: string) => `These recordings have no layer in common (the first ones: ${a}, ${b}). Compare recordings of one model.`,
};

/** What a link holds, and what not. */
export const links = {
  onThisDisk: "The page is a file on this computer, so the link works only here. For others, send the file and this:",
  copyPart: "Copy file name and view",
  lacks: (file: string) => `The link opens this page only. B must be dropped again: send ${file}, too.`,
  awaited: (file: string) => `This link compares with ${file}. Drop that file here, or choose it.`,
  choose: "Choose the file…",
  without: "Go on without it",
};

/** Files that are dropped onto the page. */
export const dropped = {
  here: "Drop a recording or a page of headscope to compare it with this one.",
  reading: (file: string) => `Reading ${file} …`,
  comparing: (file: string, head: number, of: number) => `Comparing ${file}: head ${whole(head)} of ${whole(of)} …`,
  cancel: "Cancel",
  close: "Close",
  one: (count: number) => `Drop one file at a time, not ${whole(count)}.`,
  empty: (file: string) => `${file} is empty.`,
  unreadable: (file: string) => `${file} cannot be read. Drop a file, not a folder.`,
  foreign: (file: string) => `${file} is not a recording of headscope. Drop a .safetensors file that headscope saved, or one of its .html pages.`,
  truncated: (file: string) => `${file} is truncated: its end is missing. Copy or save it again.`,
  damaged: (file: string, what: string) => `${file} is damaged (${what}). Copy or save it again.`,
  newer: (file: string) => `${file} was saved by a newer version of headscope. Make this page again with that version.`,
  changed: (file: string) => `${file} was changed while the page read it. Choose it again.`,
  tooLarge: (file: string, most: number) => `${file} is too large for the page, which reads at most ${whole(most)} MiB of statistics and maps. Use: headscope report A B.`,
  lacks: (name: string) => `it lacks ${name}`,
  overlap: "its tensors do not fill it",
  header: "its header",
  pageData: "its data",
  contents: "its content",
};

// ---------------------------------------------------------------- a training's history

export const history = {
  title: "Every head over the training",
  keys: "Left and right arrow keys move to another step, Home and End to the first and the last one. In the map, up and down choose a head.",
  hint: "Each row is a head, each column a step. Click to select a head and a step.",
  startsHint: "A thin line marks where a further watch begins.",
  quantity: "Show",
  rows: "Rows",
  ranks: { layer: "by layer", change: "most changed first", alarm: "first alarm first" },
  step: (step: number) => `Step ${whole(step)}`,
  side: (step: number, name: string) => `Step ${whole(step)}, ${name}`,
  slider: "Step",
  axis: "step",
  before: "Previous alarm",
  after: "Next alarm",
  flags: { "entropy collapse": "entropy collapse", "growing logits": "growing logits", "rising sink": "rising sink" },
  marks: { "entropy collapse": "▼", "growing logits": "▲", "rising sink": "◆" },
  does: {
    "entropy collapse": (name: string, step: string) => `${name} collapses at step ${step}`,
    "growing logits": (name: string, step: string) => `${name}: logits grow too large at step ${step}`,
    "rising sink": (name: string, step: string) => `${name} turns to the first token at step ${step}`,
  },
  change: {
    "entropy collapse": (before: string, value: string, limit: string) => `normalized entropy ${before} → ${value} (alarm below ${limit})`,
    "growing logits": (before: string, value: string, limit: string) => `largest logit ${before} → ${value} (alarm above ${limit})`,
    "rising sink": (before: string, value: string, limit: string) => `weight on the first token ${before} → ${value} (alarm above ${limit})`,
  },
  valueAt: (value: string, step: number) => `${value} at step ${whole(step)}`,
  more: (heads: number, step: string, tied: number) => `${whole(heads)} more ${plural(heads, "head")} by step ${step}${tied > 0 ? `, ${whole(tied)} of them at the same step` : ""}`,
  quiet: (steps: number) => `No alarm in ${counted(steps, "step")}.`,
  unwatched: "No alarms were requested: watch(alarms=True) raises them.",
  changed: (name: string, quantity: string) => `Most change in ${quantity}: ${name}`,
  rises: (step: string, heads: string, of: string) => `From step ${step} the entropy of ${heads} of ${of} heads rises`,
  riseOf: (name: string, before: string, after: string) => `Most: ${name}, normalized entropy ${before} → ${after}`,
  open: "Show this head at this step",
  openHead: "Show this head",
  head: (name: string) => `Head ${name}`,
  named: (number: string, layer: string) => `Head ${number} (${layer})`,
  only: (head: number) => `Head ${head}`,
  short: (layer: string, head: number) => `${layer}.${head}`,
  mapLabel: (quantity: string, heads: number, steps: number) =>
    `Map of ${quantity}: ${counted(heads, "head")}, ${counted(steps, "step")}. Up and down arrow keys choose a head, left and right a step.`,
  gridTitle: (step: number) => `All heads at step ${whole(step)}`,
  gridLabel: (quantity: string, step: number, low: string, high: string) => `${quantity} of all heads at step ${whole(step)}: ${low} to ${high}. Arrow keys choose a head.`,
  gridAxes: "Rows are layers, columns are heads.",
  value: (name: string, step: number, quantity: string, value: string) => `${name}, step ${whole(step)}: ${quantity} ${value}`,
  alarm: (what: string, value: string, limit: string) => `${what}: ${value} (limit ${limit})`,
  bands: (quantity: string) => `${quantity}, all heads`,
  bandLabel: (quantity: string, step: number, parts: string[]) =>
    `${quantity} over all heads. At step ${whole(step)}: minimum ${parts[0]}, 10 % ${parts[1]}, median ${parts[2]}, 90 % ${parts[3]}, maximum ${parts[4]}.`,
  bandHint: "Shaded: all heads, darker 10–90 %. Line: median. Red: the selected head. Dashed: the limit of the alarm.",
  limit: (value: string) => `alarm ${value}`,
  curves: (name: string) => `${name}: all quantities`,
  curveLabel: (quantity: string, name: string, step: number, value: string, low: string, high: string) =>
    `${quantity} of ${name}: ${value} at step ${whole(step)}; from ${low} to ${high}.`,
  stored: (of: { scale: "linear" | "asinh"; pivot: number; low: number; high: number; bits: number; stride: number }) => {
    const every = of.stride > 1 ? ` at every ${of.stride}th of these steps` : "";
    if (of.bits === 32) return "";
    const error = (of.high - of.low) / 252 / 2;
    const size = of.scale === "linear" ? `± ${figure(error, 2)}` : `± ${percent(error)} (± ${figure(error * of.pivot, 2)} near 0)`;
    return `Stored in 8 bits${every}: ${size}.`;
  },
  logScale: "Logarithmic scale.",
  log: "log scale", // where there is little room
  table: {
    title: (count: number) => counted(count, "alarm"),
    hint: "Each alarm is raised once, and again only after the value has gone back within its limit. “Before” is what the value is compared with: the largest normalized entropy so far, the first logit, the smallest weight on the first token so far. Click a head to see it.",
    columns: { step: "step", head: "head", what: "alarm", value: "value", limit: "limit", before: "before" },
    more: (count: number) => `and ${whole(count)} more, in the history file`,
  },
};
