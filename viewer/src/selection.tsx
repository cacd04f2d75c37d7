// The selected query and key: the cell, the tokens in the colours of its row and column, and the largest keys.

import { useRef } from "preact/hooks";
import { data, type Head, hasTexts, hasTokens, known, type Layer, queryAt, range, token } from "./data";
import { type Colours, colour, type Field, place, type Scale } from "./field";
import { single } from "./head";
import { Cell, Exact } from "./map";
import { useRoving } from "./roving";
import type { State } from "./state";
import * as texts from "./texts";
import { fill, whole } from "./texts";
import { bin, binAt, mapValue, windowsOf } from "./words";

type Change = (part: Partial<State>) => void;

/** The bins of a token as query and as key; the row stays where the token is not a query. */
function tokenBins(layer: Layer, at: number, otherwise: { row: number | null }): { row: number | null; column: number | null } {
  const column = binAt(layer, "key", at);
  const row = at >= queryAt(layer, 0) ? binAt(layer, "query", at - queryAt(layer, 0)) : otherwise.row;
  return { row, column };
}

interface Pointed {
  layer: Layer;
  field: Field;
  state: State;
  change: Change;
  over: number | null;
  setOver: (at: number | null) => void;
}

export function Pinned({ head, ...rest }: Pointed & { head: Head }) {
  const { layer, field: of, state, change } = rest;
  const { row, column } = state;
  const clear = () => {
    document.querySelector<HTMLElement>(".map canvas")!.focus({ preventScroll: true }); // the button disappears
    change({ row: null, column: null });
  };
  return (
    <div class="pinned">
      <header class="pinned-head">
        <h3><SelectedTitle layer={layer} row={row} column={column} /></h3>
        {row !== null && column !== null && <button type="button" aria-label={texts.selected.clearLabel} onClick={clear}>{texts.selected.clear}</button>}
      </header>
      {row === null || column === null ? (
        <p class="hint" title={texts.selected.noneHelp}>{texts.selected.none(chips(layer, state))}</p>
      ) : (
        <p aria-live="polite">
          {state.cell && <Exact layer={layer} head={state.head} at={state.cell} window={windowsOf(layer) > 0 ? state.window : null} />}
          <Cell {...{ layer, head, field: of, row, column }} />
        </p>
      )}
      {layer.map!.ranges && (chips(layer, state) ? <Strips {...rest} /> : <Ranks {...{ layer, field: of, state, change }} />)}
    </div>
  );
}

/** "Selected", with the token or patch if both query and key of the cell are that one. */
function SelectedTitle({ layer, row, column }: { layer: Layer; row: number | null; column: number | null }) {
  const alone = row !== null && single(layer) && queryAt(layer, row) === column;
  const name = alone && hasTokens(layer) ? token(column!, true) : null;
  if (name === null) return <>{texts.selected.title}</>;
  return <>{fill(data.image ? texts.selected.patch : texts.selected.token, { token: data.image ? name : <Named name={name} at={column!} /> })}</>;
}

function Named({ name, at }: { name: string; at: number }) {
  return <>{fill(texts.NAMED, { name: <bdi>{name}</bdi>, at: whole(at) })}</>;
}

/** The heading of a list of tokens or bins: "␣on (25) attends to", "keys 8–15 are attended to by". */
function Attends({ layer, axis, at }: { layer: Layer; axis: "query" | "key"; at: number | null }) {
  const { attends, attended, attendsToNone, attendedByNone } = texts.selected;
  if (at === null) return <>{axis === "query" ? attendsToNone : attendedByNone}</>;
  const bins = axis === "query" ? layer.map!.rows : layer.map!.columns;
  const [start, stop] = layer.map!.ranges ? range(at, bins, layer.lengths![axis === "query" ? 0 : 1]) : [at, at + 1];
  const many = stop - start > 1;
  const where = axis === "query" ? queryAt(layer, start) : start;
  const name = !many && hasTokens(layer) ? token(where, true) : null;
  const shown = name === null ? <bdi>{bin(layer, axis, at)}</bdi> : data.image ? <bdi>{name}</bdi> : <Named name={name} at={start} />;
  return <>{fill(axis === "query" ? attends(many) : attended(many), { name: shown })}</>;
}

const CHIPS = 160;

/** Whether the visible tokens are few enough to list them all. */
function chips(layer: Layer, state: State): boolean {
  return hasTexts(layer) && Math.max(...layer.lengths!) / state.zoom[0] <= CHIPS;
}

/** The bins of the selected row and column with the largest values, where there are too many keys to list them all. */
function Ranks({ layer, field: of, state, change }: { layer: Layer; field: Field; state: State; change: Change }) {
  const { row, column } = state;
  if (row === null || column === null) return null;
  const list = (length: number, value: (at: number) => number) =>
    Array.from({ length }, (_, at) => [at, value(at)]).filter(([, p]) => p === p && p > 0).sort((a, b) => b[1] - a[1]).slice(0, 6);
  const keys = list(of.columns, (at) => of.values[row * of.columns + at]);
  const queries = list(of.rows, (at) => of.values[at * of.columns + column]);
  const line = (axis: "query" | "key") => ([at, p]: number[]) => (
    <li key={at}>
      <button type="button" onClick={() => change(axis === "key" ? { column: at } : { row: at })}><bdi>{bin(layer, axis, at)}</bdi></button>
      <span class="meter" aria-hidden="true"><i style={{ width: `${Math.min(100, (100 * p) / of.top)}%` }} /></span>
      <span>{mapValue(p)}</span>
    </li>
  );
  return (
    <>
      <h4><Attends layer={layer} axis="query" at={row} /></h4>
      <ol class="ranks">{keys.map(line("key"))}</ol>
      <h4><Attends layer={layer} axis="key" at={column} /></h4>
      <ol class="ranks">{queries.map(line("query"))}</ol>
      <p class="hint">{texts.strongest.cells(layer.map!.exact, of.pool)} {hasTexts(layer) && texts.strongest.zoomForTokens}</p>
    </>
  );
}

/** The visible tokens, coloured by the weights of a query, and by the weights on a key. */
function Strips({ layer, field: of, state, change, over, setOver }: Pointed) {
  const [k, x, y] = state.zoom;
  const keys = layer.lengths![1];
  const from = (middle: number) => Math.min(1 - 1 / k, Math.max(0, middle - 0.5 / k));
  const start = (middle: number) => Math.floor(from(middle) * keys);
  const stop = (middle: number) => Math.min(keys, Math.ceil((from(middle) + 1 / k) * keys), start(middle) + CHIPS);
  const marked = over === null ? state : strongestOf(layer, over, state); // a preview of what a click selects
  const row = marked.row ?? layer.map!.rows - 1;
  const column = marked.column ?? layer.map!.columns - 1;
  const [keyStrip, queryStrip] = [useRef<HTMLDivElement>(null), useRef<HTMLDivElement>(null)];
  const [keyRoving, queryRoving] = [useRoving(keyStrip, "button", { lines: false }), useRoving(queryStrip, "button", { lines: false })];
  const strip = (which: "key" | "query") => {
    const middle = which === "key" ? x : y;
    return (
      <div class="strip" onMouseLeave={() => setOver(null)} ref={which === "key" ? keyStrip : queryStrip} {...(which === "key" ? keyRoving : queryRoving)}>
        {Array.from({ length: stop(middle) - start(middle) }, (_, n) => start(middle) + n).map((at) => (
          <Chip key={at} {...{ at, layer, field: of, scale: state.scale, colours: state.colours }}
            row={which === "key" ? row : binAt(layer, "query", at - queryAt(layer, 0))}
            column={which === "key" ? binAt(layer, "key", at) : column}
            missing={which === "query" && at < queryAt(layer, 0)}
            over={setOver}
            pin={() => {
              setOver(null); // a preview of the token would hide that it is no longer selected
              change(pinOf(layer, at, state));
            }} />
        ))}
      </div>
    );
  };
  return (
    <>
      <h4><Attends layer={layer} axis="query" at={row} /></h4>
      {strip("key")}
      <h4><Attends layer={layer} axis="key" at={column} /></h4>
      {strip("query")}
      <p class="hint">{texts.selected.hint} {!layer.map!.exact && texts.selected.pooledHint}</p>
    </>
  );
}

/** The state with a token selected: in the text, and in the map as a query with the key that it attends to most. */
export function selected(at: number, state: State): Partial<State> {
  const layer = data.layers[state.layer];
  return { token: at, page: null, ...(layer.map?.ranges && hasTexts(layer) ? strongestOf(layer, at, state) : {}) };
}

/** The bins of a token as a query and of its strongest key; of a token that is no query, its bin as a key, and the row stays. */
export function strongestOf(layer: Layer, at: number, state: State): { row: number | null; column: number | null } {
  const bins = tokenBins(layer, at, state);
  const map = known(state.layer, state.head)?.map;
  if (!map || bins.row === null || at < queryAt(layer, 0)) return bins;
  const values = state.pool === "max" ? map.max : map.mean;
  let column = bins.column;
  let most = -1;
  for (let n = state.sink ? 1 : 0; n < map.columns; n++) {
    const value = values[bins.row * map.columns + n];
    if (value > most) [most, column] = [value, n];
  }
  return { row: bins.row, column };
}

function pinOf(layer: Layer, at: number, state: State): Partial<State> {
  const { row, column } = strongestOf(layer, at, state);
  return state.row === row && state.column === column ? { row: null, column: null } : { row, column };
}

interface ChipProps {
  at: number;
  layer: Layer;
  field: Field;
  scale: Scale;
  colours: Colours;
  row: number | null;
  column: number | null;
  missing: boolean;
  over: (at: number | null) => void;
  pin: () => void;
}

function Chip({ at, field: of, scale, colours, row, column, missing, over, pin }: ChipProps) {
  const value = row === null || column === null || missing ? NaN : of.values[row * of.columns + column];
  const shown = value === value ? colour(place(value, of, scale), colours) : null;
  const style = shown ? { background: shown.fill, color: shown.white ? "white" : "black" } : {};
  return (
    <button type="button" style={style} title={texts.names.chip(at, token(at, true)!, shown ? mapValue(value) : "")}
      onMouseEnter={() => over(at)} onFocus={() => over(at)} onBlur={() => over(null)} onClick={pin}>
      <bdi>{token(at)}</bdi>
    </button>
  );
}

