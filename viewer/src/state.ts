// What is shown. All of it stands in the address, so that a link leads back to the same view.

import { data } from "./data";
import type { Colours, Pool, Scale } from "./field";

export type View = "heads" | "head" | "compare" | "table" | "found" | "trace";
export type Thumbs = "received" | "patch" | "map";

export interface State {
  view: View;
  layer: number;
  head: number;
  otherLayer: number;
  otherHead: number;
  pool: Pool;
  scale: Scale;
  colours: Colours;
  sink: boolean; // hide it
  sort: string; // "" = the order of the model
  down: boolean;
  pattern: string; // "" = all
  by: string; // the statistic to filter by, "" = none
  least: number | null; // no limit
  under: boolean; // at most that, not at least
  row: number | null; // pinned bins
  column: number | null;
  cell: [number, number] | null; // the pinned query and key, where a server has single weights
  from: number | null; // the first query of the strip that is shown, null = as the pinned row has it
  many: number; // queries at a time
  thumbs: Thumbs; // of an image: what the small pictures show
  over: boolean; // colours lie over the image
  zoom: [number, number, number]; // scale, and the middle of what is seen as shares of keys and queries
}

/** With many keys most weights are small: linear colours would show few of them. */
const small = data.layers.some((layer) => layer.map && (!layer.map.exact || (!data.image && layer.map.columns > 64)));

const DULL = ["uniform", "first", "local"];

/** The head to open first: the one that is likest to something telling. */
function telling(): [number, number] {
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

const [LAYER, HEAD] = telling();

export const FIRST: State = {
  view: "heads",
  layer: LAYER,
  head: HEAD,
  otherLayer: 0,
  otherHead: data.layers[0].heads > 1 && LAYER === 0 && HEAD === 0 ? 1 : 0,
  pool: "mean",
  scale: small ? "log" : "linear",
  colours: "viridis",
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
  over: coarse(),
  zoom: [1, 0.5, 0.5],
};

/** Whether a patch has enough pixels for colours over them to be told from the image. */
function coarse(): boolean {
  return data.image !== null && data.image.height / data.image.grid[0] >= 4;
}

/** Whether the first column may be left out: where patches alone are looked at, it is one as any other. */
export const SINK = data.image === null || data.image.special > 0;

/** The views that this page has something for. */
export const VIEWS: [View, string][] = [
  ["heads", "All heads"],
  ["head", "One head"],
  ["compare", "Compare"],
  ["table", "Figures"],
  ...(data.tables.length > 0 ? ([["found", "What follows"]] as [View, string][]) : []),
  ...(data.trace ? ([["trace", "Step by step"]] as [View, string][]) : []),
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

/** The state that an address names; what it does not say, or says wrongly, is as at first. */
export function parse(hash: string): State {
  const said = new URLSearchParams(hash.replace(/^#/, ""));
  const layer = whole(said.get("layer"), data.layers.length) ?? FIRST.layer;
  const otherLayer = whole(said.get("other"), data.layers.length) ?? FIRST.otherLayer;
  const map = data.layers[layer].map;
  const zoom = (said.get("zoom") ?? "").split(",").map(Number);
  const cell = (said.get("cell") ?? "").split(",").map((text, n) => whole(text, data.served?.[layer]?.[n] ?? 0));
  const names = ["", ...data.names.map((each) => each.name)];
  return {
    view: oneOf(said.get("view"), VIEWS.map(([name]) => name), FIRST.view),
    layer,
    head: whole(said.get("head"), data.layers[layer].heads) ?? FIRST.head % data.layers[layer].heads,
    otherLayer,
    otherHead: whole(said.get("otherhead"), data.layers[otherLayer].heads) ?? FIRST.otherHead % data.layers[otherLayer].heads,
    pool: oneOf(said.get("pool"), ["mean", "max"], FIRST.pool),
    scale: oneOf(said.get("scale"), ["linear", "log"], FIRST.scale),
    colours: oneOf(said.get("colours"), ["viridis", "cividis", "magma"], FIRST.colours),
    sink: SINK && said.get("sink") === "hidden",
    sort: oneOf(said.get("sort"), [...names, "score"], FIRST.sort),
    down: said.get("down") !== "0",
    pattern: oneOf(said.get("pattern"), ["", ...Object.keys(data.patternWords)], ""),
    by: oneOf(said.get("by"), [...names, "score"], ""),
    least: said.get("least") && Number.isFinite(Number(said.get("least"))) ? Number(said.get("least")) : null,
    under: said.get("under") === "1",
    row: map ? whole(said.get("row"), map.rows) : null,
    column: map ? whole(said.get("column"), map.columns) : null,
    cell: cell.length === 2 && !cell.includes(null) ? (cell as [number, number]) : null,
    from: whole(said.get("from"), data.layers[layer].strips?.lengths[0] ?? 0),
    many: whole(said.get("many"), MOST_QUERIES + 1) || FIRST.many,
    thumbs: oneOf(said.get("thumbs"), ["received", "patch", "map"], FIRST.thumbs),
    over: said.has("over") ? said.get("over") === "1" : FIRST.over,
    // always a new one: an address that drops the zoom ends one that is on its way, too
    zoom: zoom.length === 3 && zoom.every(Number.isFinite) && zoom[0] >= 1 && zoom[0] <= MOST_ZOOM ? (zoom as State["zoom"]) : [...FIRST.zoom],
  };
}

/** The address of a state: what differs from the first one. */
export function address(state: State): string {
  const said = new URLSearchParams();
  const add = (name: string, value: unknown, first: unknown) => {
    if (String(value) !== String(first) && value !== null) said.set(name, String(value));
  };
  add("view", state.view, FIRST.view);
  add("layer", state.layer, FIRST.layer);
  add("head", state.head, FIRST.head % data.layers[state.layer].heads);
  if (state.view === "compare") {
    said.set("other", String(state.otherLayer));
    said.set("otherhead", String(state.otherHead));
  }
  for (const name of ["pool", "scale", "colours", "sort", "pattern", "by", "least", "row", "column", "cell", "from", "many", "thumbs"] as const) {
    add(name, state[name], FIRST[name]);
  }
  if (!state.down) said.set("down", "0");
  if (state.under) said.set("under", "1");
  if (state.sink) said.set("sink", "hidden");
  if (state.over !== FIRST.over) said.set("over", state.over ? "1" : "0");
  if (state.zoom[0] > 1) said.set("zoom", state.zoom.map((each) => +each.toPrecision(5)).join(","));
  return `#${said}`;
}
