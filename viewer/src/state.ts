// What the page shows. The address holds all of it, so that a link leads back to the same view.

import { data, HAS_READING, HAS_SEGMENTS } from "./data";
import { tiledLengths } from "./exact";
import { addHistory, FIRST_HISTORY, type HistoryState, parseHistory } from "./history_data";
import { type Colours, PALETTES, type Pool, type Scale } from "./field";
import { type Language, LANGUAGES } from "./languages";
import { comparedFile, other } from "./other";
import { labelled, NAME } from "./visible";
import { HAS_WINDOWS } from "./words";

export type Tab = "history" | "alarms" | "changes" | "heads" | "head" | "reading" | "segments" | "compare" | "table" | "found" | "trace";
export type View = Tab | "change"; // a change is shown under the tab of changes
export type Thumbs = "received" | "patch" | "map";

export interface State extends HistoryState {
  view: View;
  lang: Language | ""; // that the address names
  layer: number;
  head: number;
  side: "a" | "b"; // of two recordings: whose heads are shown
  otherLayer: number | null; // null = the same head as the first, in the other recording
  otherHead: number | null;
  otherSide: "a" | "b" | null; // the recording of that head; null = B where there is one
  pool: Pool;
  scale: Scale;
  colours: Colours; // an address has palettes only
  sink: boolean; // hide it
  sort: string; // "" = the order of the model
  down: boolean;
  pattern: string; // "" = all
  by: string; // the statistic to filter by, "" = none
  least: number | null; // no limit
  under: boolean; // at most that, not at least
  row: number | null; // the selected bins
  column: number | null;
  cell: [number, number] | null; // the selected query and key, where single weights are known
  from: number | null; // the first query of the strip, null = around the selected row
  many: number; // queries at a time
  thumbs: Thumbs; // of an image: what the small pictures show
  cards: boolean; // whether what to look at first is shown
  over: boolean; // colours lie over the image
  token: number | null; // the token whose lines stay, in the text
  page: number | null; // of the text
  window: number; // whose text is shown, where the model read a text in windows
  alone: boolean; // whether the map shows that window only, where the page holds q and k
  also: [number, number][]; // further heads with lines in the text
  toward: "from" | "to" | "both"; // lines from queries, to keys
  patchesOf: number | null; // the segment whose tokens look at the images of a prompt; null = the selected token
  segmentFrom: number | null; // whose tokens attend; null = the last segment
  segmentTo: number;
  segmentFirst: boolean; // whether shares of segments hold the weight on the first token; maps have `sink`
  onlyMoved: boolean; // of two recordings: only the heads that moved
  against: string; // the name of the file that the address compares with: it cannot hold the file
  zoom: [number, number, number]; // scale, and the middle of the visible part as shares of keys and queries
}

/** With several weights in a cell, most of their means are small: linear colours would show few of them. */
const small = data.layers.some(({ map, lengths }) => map && !map.exact && lengths?.[1] !== map.columns);

/** Over several inputs the means of most heads look even, those of an induction head, too: the largest weights tell them apart. Over the
 * windows of one text they would fill the maps: with 40 windows nearly every cell is large in one of them. */
const merged = data.layers.some(({ map, runs }) => map && !map.exact && runs > 1);

const DULL = ["uniform", "first", "local"];

/** The head to open first where nobody chose one: that of the first card, else the one that matches an informative pattern best. */
function telling(): [number, number] {
  const card = data.highlights.find(({ layer, head }) => layer !== null && head !== null);
  if (card) return [card.layer!, card.head!];
  let [best, place]: [number, [number, number]] = [-1, [0, 0]];
  data.layers.forEach((layer, at) => {
    for (let head = 0; head < layer.heads; head++) {
      const found = data.image?.looks[at]?.[head] ?? data.patterns[at]?.[head]?.[0];
      const value = found ? found[1] - (DULL.includes(found[0]) ? 1 : 0) : -1;
      if (value > best) [best, place] = [value, [at, head]];
    }
  });
  return place;
}

const [LAYER, HEAD] = data.opensOn ?? telling();

/** The head to compare with: that of another card, else the first one. */
function beside(): [number, number] {
  const card = data.highlights.find(({ layer, head }) => layer !== null && head !== null && (layer !== LAYER || head !== HEAD));
  return card ? [card.layer!, card.head!] : [0, data.layers[0].heads > 1 && LAYER === 0 && HEAD === 0 ? 1 : 0];
}

/** The second head of two that are compared, and its recording: with another recording the same head of that one. */
export function secondOf({ layer, head, otherLayer, otherHead, otherSide }: State): { layer: number; head: number; side: "a" | "b" } {
  const side = other() && otherSide !== "a" ? "b" : "a";
  const [toLayer, toHead] = side === "b" ? [layer, head] : beside();
  const at = otherLayer ?? toLayer;
  return { side, layer: at, head: otherHead ?? (otherLayer === null ? toHead : toHead % data.layers[at].heads) };
}

export const FIRST: State = {
  ...FIRST_HISTORY,
  view: data.history ? "history" : other() ? "changes" : "heads",
  lang: "",
  layer: LAYER,
  head: HEAD,
  side: "a",
  otherLayer: null,
  otherHead: null,
  otherSide: null,
  pool: merged && !HAS_WINDOWS ? "max" : "mean",
  scale: small && !merged ? "log" : "linear",
  colours: "blues",
  sink: false,
  sort: "",
  down: true,
  pattern: "",
  by: "",
  least: null,
  under: false,
  row: null,
  column: null,
  cell: null,
  from: null,
  many: 100,
  thumbs: "received",
  cards: true,
  over: coarse(),
  token: null,
  page: null,
  window: 0,
  alone: false,
  also: [],
  toward: "from",
  patchesOf: null,
  segmentFrom: null,
  segmentTo: 0,
  segmentFirst: true,
  onlyMoved: true,
  against: "",
  zoom: [1, 0.5, 0.5],
};

/** Whether a patch has enough pixels to tell the colours over it from the image. */
function coarse(): boolean {
  return data.image !== null && data.image.height / data.image.grid[0] >= 4;
}

/** Whether the first column can be hidden: where all keys are patches, the first one is like any other. */
export const SINK = data.image === null || data.image.special > 0;

/** The views that this page has something for; a recording that is compared with it may come later, or is named by the address. */
export function views(against: string): Tab[] {
  return other() || against ? ["changes", ...VIEWS] : VIEWS;
}

const VIEWS: Tab[] = data.history ? ["history", "alarms"] : [
  "heads",
  "head",
  ...(HAS_READING || HAS_WINDOWS ? (["reading"] as const) : []),
  ...(HAS_SEGMENTS ? (["segments"] as const) : []),
  "compare",
  "table",
  ...(data.tables.length > 0 ? (["found"] as const) : []),
  ...(data.trace ? (["trace"] as const) : []),
];

const MOST_ZOOM = 2 ** 17;
export const MOST_QUERIES = 1000; // of a strip at a time

function whole(text: string | null, most: number): number | null {
  const found = /^\d+$/.test(text ?? "") ? Number(text) : NaN; // Number("") is 0
  return found < most ? found : null;
}

function oneOf<T extends string>(text: string | null, known: readonly T[], otherwise: T): T {
  return known.includes(text as T) ? (text as T) : otherwise;
}

/** The heads of "1.2,3.0" that exist. */
function placesOf(text: string | null): [number, number][] {
  const places = (text ?? "").split(",").map((each) => each.split(".").map(Number));
  return places.filter((each): each is [number, number] => each.length === 2 && Number.isInteger(each[0]) && Number.isInteger(each[1]) && each[1] >= 0 && each[1] < (data.layers[each[0]]?.heads ?? 0));
}

/** The state that an address names; a missing or wrong value is that of the first state. */
export function parse(hash: string): State {
  const params = new URLSearchParams(hash.replace(/^#/, ""));
  const layer = whole(params.get("layer"), data.layers.length) ?? FIRST.layer;
  const otherLayer = whole(params.get("other"), data.layers.length);
  const map = data.layers[layer].map;
  const zoom = (params.get("zoom") ?? "").split(",").map(Number);
  const names = ["", ...data.names.map((each) => each.name)];
  const named = data.history ? null : params.get("against");
  const against = named ? labelled(named, NAME, false) : "";
  const window = whole(params.get("window"), data.runTokens?.ids.length ?? 0) ?? 0;
  const cell = (params.get("cell") ?? "").split(",").map((text, n) => whole(text, tiledLengths(layer, HAS_WINDOWS ? window : undefined)?.[n] ?? 0));
  const length = data.tokens?.labels.length ?? data.runTokens?.ids[window]?.length ?? 0;
  return {
    ...parseHistory(params),
    view: oneOf(params.get("view"), [...views(against), ...(other() || against ? (["change"] as const) : [])], other() || data.history ? FIRST.view : "heads"),
    lang: oneOf(params.get("lang"), ["", ...(Object.keys(LANGUAGES) as Language[])], ""),
    layer,
    head: whole(params.get("head"), data.layers[layer].heads) ?? FIRST.head % data.layers[layer].heads,
    otherLayer,
    side: oneOf(params.get("side"), ["a", "b"], FIRST.side),
    otherHead: otherLayer === null ? null : whole(params.get("otherhead"), data.layers[otherLayer].heads),
    otherSide: params.has("otherside") ? oneOf<"a" | "b">(params.get("otherside"), ["a", "b"], "b") : null,
    pool: oneOf(params.get("pool"), ["mean", "max"], FIRST.pool),
    scale: oneOf(params.get("scale"), ["linear", "log"], FIRST.scale),
    colours: oneOf(params.get("colours"), PALETTES, FIRST.colours),
    sink: SINK && params.get("sink") === "hidden",
    sort: oneOf(params.get("sort"), [...names, "score"], FIRST.sort),
    down: params.get("down") !== "0",
    pattern: oneOf(params.get("pattern"), ["", ...Object.keys(data.patternWords), ...Object.keys(data.image?.regionWords ?? {})], ""),
    by: oneOf(params.get("by"), [...names, "score"], ""),
    least: params.get("least") && Number.isFinite(Number(params.get("least"))) ? Number(params.get("least")) : null,
    under: params.get("under") === "1",
    row: map ? whole(params.get("row"), map.rows) : null,
    column: map ? whole(params.get("column"), map.columns) : null,
    cell: cell.length === 2 && !cell.includes(null) ? (cell as [number, number]) : null,
    from: whole(params.get("from"), data.layers[layer].strips?.lengths[0] ?? 0),
    many: whole(params.get("many"), MOST_QUERIES + 1) || FIRST.many,
    thumbs: oneOf(params.get("thumbs"), ["received", "patch", "map"], FIRST.thumbs),
    cards: params.get("cards") !== "0",
    onlyMoved: params.get("moved") !== "0",
    against,
    over: params.has("over") ? params.get("over") === "1" : FIRST.over,
    token: whole(params.get("token"), length),
    page: whole(params.get("page"), length),
    window,
    alone: params.get("alone") === "1",
    patchesOf: whole(params.get("patchesOf"), 64),
    segmentFrom: whole(params.get("segmentFrom"), 64),
    segmentTo: whole(params.get("segmentTo"), 64) ?? 0,
    segmentFirst: params.get("segmentFirst") !== "hidden",
    also: placesOf(params.get("also")),
    toward: oneOf(params.get("toward"), ["from", "to", "both"], FIRST.toward),
    // always a new one: an address that drops the zoom ends one that is on its way, too
    zoom: zoom.length === 3 && zoom.every(Number.isFinite) && zoom[0] >= 1 && zoom[0] <= MOST_ZOOM ? (zoom as State["zoom"]) : [...FIRST.zoom],
  };
}

const OF_A_HEAD: View[] = ["head", "reading", "compare", "change"];

/** The address of a state: what differs from the first one. Where one head is shown, and where the address is `shared`, it names the head and
 * the window, too: the first ones are others on another page of the same model. */
export function address(state: State, shared = false): string {
  const params = new URLSearchParams();
  const add = (name: string, value: unknown, first: unknown) => {
    if (String(value) !== String(first) && value !== null) params.set(name, String(value));
  };
  add("view", state.view, FIRST.view);
  add("lang", state.lang, FIRST.lang);
  add("side", state.side, FIRST.side);
  const named = shared || OF_A_HEAD.includes(state.view);
  add("layer", state.layer, named ? null : FIRST.layer);
  add("head", state.head, named ? null : FIRST.head % data.layers[state.layer].heads);
  if (named && HAS_WINDOWS) params.set("window", String(state.window));
  if (state.view === "compare") {
    const { layer, head, side } = secondOf(state);
    if (state.otherLayer !== null || !other()) { // else it is the same head as the first one, whichever that is
      params.set("other", String(layer));
      params.set("otherhead", String(head));
    }
    if (other()) params.set("otherside", side);
  }
  for (const name of ["pool", "scale", "colours", "sort", "pattern", "by", "least", "row", "column", "cell", "from", "many", "thumbs"] as const) {
    add(name, state[name], FIRST[name]);
  }
  for (const name of ["token", "page", "window", "toward", "segmentFrom", "segmentTo", "patchesOf"] as const) add(name, state[name], FIRST[name]);
  if (state.also.length > 0) params.set("also", state.also.map((each) => each.join(".")).join(","));
  addHistory(params, state);
  if (state.alone) params.set("alone", "1");
  if (!state.down) params.set("down", "0");
  if (!state.onlyMoved) params.set("moved", "0");
  const against = comparedFile() || state.against;
  if (against) params.set("against", against);
  if (!state.cards) params.set("cards", "0");
  if (state.under) params.set("under", "1");
  if (state.sink) params.set("sink", "hidden");
  if (!state.segmentFirst) params.set("segmentFirst", "hidden");
  if (state.over !== FIRST.over) params.set("over", state.over ? "1" : "0");
  if (state.zoom[0] > 1) params.set("zoom", state.zoom.map((each) => +each.toPrecision(5)).join(","));
  return `#${params}`;
}
