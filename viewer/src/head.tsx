// One head opened large: its map, the selected cell, the tokens, its strongest connections and its statistics.

import { useEffect, useLayoutEffect, useMemo, useRef, useState } from "preact/hooks";
import { data, type Head, hasPatches, hasTexts, hasTokens, head as decoded, known, type Layer, queryAt, range, token } from "./data";
import { type Colours, colour, type Field, field, place, type Scale } from "./field";
import { UNIT } from "./describe";
import { Term } from "./glossary";
import { Bar } from "./legend";
import { Cell, Exact, MapView, type Zoom } from "./map";
import { Images, Regions } from "./picture";
import { useRoving } from "./roving";
import { useRoom } from "./screen";
import type { State } from "./state";
import { SegmentTable } from "./segments";
import { hasStrips, Strips as Band, Top } from "./strips";
import { Meanings } from "./table";
import { asField, isExact, served, type Tile } from "./tiles";
import * as texts from "./texts";
import { counted, figure, fill, percent, whole } from "./texts";
import { Why } from "./why";
import { bin, binAt, binning, isClear, mapValue, nameOf, pair } from "./words";

interface Props {
  state: State;
  theme: string;
  change: (part: Partial<State>) => void;
  drawn?: (place: Place) => void; // called with the head that is drawn
}

interface Place {
  layer: number;
  head: number;
}

/** A head once it is decoded; null before. */
export function useHead(layer: number, head: number): Head | null {
  const [found, setFound] = useState<{ layer: number; head: number; is: Head } | null>(null);
  useEffect(() => {
    let stale = false;
    void decoded(layer, head).then((is) => !stale && setFound({ layer, head, is }));
    return () => void (stale = true);
  }, [layer, head]);
  return found && found.layer === layer && found.head === head ? found.is : known(layer, head);
}

/** What to show: the last heads, in their state, until these ones are decoded. Until then only a zoom is applied, and only if
 * the next heads use the same zoom: a selected bin may not exist in their maps. */
export function useShown(state: State, heads: (Head | null)[], change: Props["change"]) {
  const last = useRef({ state, heads });
  const ready = !heads.includes(null) || last.current.heads.includes(null);
  if (ready) last.current = { state, heads };
  const late: Props["change"] = ({ zoom }) => zoom && state.zoom === last.current.state.zoom && change({ zoom });
  return { ...last.current, change: ready ? change : late };
}

export function HeadView({ state: asked, theme, change: changed, drawn }: Props) {
  const { state, heads: [found], change } = useShown(asked, [useHead(asked.layer, asked.head)], changed);
  const layer = data.layers[state.layer];
  const shown = useMemo(
    () => (found?.map ? field(found.map, state.pool, state.sink, layer.map!.exact) : null),
    [found, state.pool, state.sink],
  );
  const [over, setOver] = useState<number | null>(null); // a token under the pointer or in focus
  const marked = over === null ? state : tokenBins(layer, over, state);
  const zoom: Zoom = useMemo(() => ({ at: state.zoom, change: (at) => change({ zoom: at }) }), [state.zoom, change]);
  useLayoutEffect(() => drawn?.({ layer: state.layer, head: state.head }), [state.layer, state.head]);
  const section = useRef<HTMLElement>(null);
  const canvas = useRef<HTMLDivElement>(null);
  const room = useRoom(canvas);
  useLayoutEffect(() => { // a token that is removed under the pointer fires no mouseleave
    if (over !== null && !section.current!.querySelector(".strip:is(:hover, :focus-within)")) setOver(null);
  });
  const title = nameOf(state.layer, state.head);
  const pin = (row: number | null, column: number | null, cell?: [number, number]) => change({ row, column, cell: cell ?? null });
  const [tile, setTile] = useState<Tile | null>(null);
  return (
    <section aria-labelledby="head-title" ref={section}>
      <Likeness layer={state.layer} head={state.head} />
      {layer.map === null && <NoMap />}
      {data.image && layer.map && !hasPatches(layer) && <p class="hint">{texts.head.notPatches}</p>}
      {data.image && hasPatches(layer) && layer.map && !single(layer) && <p class="hint">{texts.head.pooledPatches(layer.lengths![1])}</p>}
      {shown && found?.map && hasPatches(layer) && single(layer) && <Images {...{ layer, map: found.map, field: shown, state, theme, change }} />}
      <div class="panes">
        {shown && found && (
          <div ref={canvas} class="drawing">
            {hasPatches(layer) && <h3>{texts.head.fullMap}</h3>}
            <Legend {...{ layer, field: tile ? asField(tile, state.pool) : shown, state, tile }} />
            <MapView
              {...{ layer, head: found, field: shown, scale: state.scale, colours: state.colours, zoom, theme, pin }}
              number={state.head} row={marked.row} column={marked.column} cell={over === null ? state.cell : null} inSight={setTile} most={1400} room={room} title={title}
              exports={`headscope-layer-${state.layer}-head-${state.head}`}
            />
          </div>
        )}
        <div class="beside" tabIndex={0} role="region" aria-label={texts.head.beside}>
          {shown && found && <Pinned {...{ layer, head: found, field: shown, state, change, over, setOver }} />}
          {shown && found && <Why {...{ layer, state, change }} />}
          {found?.top && state.row !== null && <Top key={`${state.row} ${state.cell}`} layer={layer} top={found.top} row={state.row} cell={state.cell} />}
          {found && <Largest {...{ layer, head: found, change }} />}
          {data.image && <Regions layer={state.layer} head={state.head} />}
          <SegmentTable layer={layer} head={state.head} colours={state.colours} />
          <Figures layer={state.layer} head={state.head} />
        </div>
      </div>
      {hasStrips(layer) && !layer.map?.exact && <Band {...{ layer, state, theme, change }} />}
    </section>
  );
}

/** Whether each key and query has a bin of its own. */
function single({ map, lengths }: Layer): boolean {
  return map !== null && lengths !== null && map.rows === lengths[0] && map.columns === lengths[1];
}

const WEAK = 0.3; // below this score no pattern fits

/** The region of the image that the head looks at most, in a sentence. */
function Region({ look }: { look: [string, number] | null | undefined }) {
  const { mostRegion, noRegion } = texts.image;
  if (!isClear(look)) return <p class="likeness">{noRegion}</p>;
  return <p class="likeness" title={data.image!.regionWords[look[0]].meaning}>{fill(mostRegion(look[1]), { region: <b>{texts.regionNames[look[0]] ?? look[0]}</b> })}</p>;
}

/** The pattern that the head matches best, in a sentence. */
function Likeness({ layer, head }: { layer: number; head: number }) {
  if (data.image && data.image.looks.length > 0 && data.patterns[layer]?.[head]?.[0]?.[0] !== "fixed key") return <Region look={data.image.looks[layer]?.[head]} />;
  const best = data.patterns[layer]?.[head]?.[0];
  if (!best) return null;
  const [name, score, rows] = best;
  if (score < WEAK) return <p class="likeness" title={texts.head.noPatternHelp}>{texts.head.noPattern}</p>;
  const { kind, does } = texts.patterns[name]?.(UNIT) ?? { kind: name, does: data.patternWords[name] };
  return (
    <p class="likeness" title={texts.head.likenessHelp}>
      {fill(texts.head.likeness, { kind: <b><Term name={name}>{kind}</Term></b>, match: percent(score), rows: counted(rows, UNIT), does })}
    </p>
  );
}

export function NoMap() {
  return <p class="hint">{texts.head.noMap}</p>;
}

/** The name of the head that is drawn, and the steps to its neighbours: in the bar, on a phone at the bottom. */
export function InView({ drawn, state, change }: Pick<Props, "state" | "change"> & { drawn: Place }) {
  const { steps } = texts.head;
  const step = (mark: string, name: string, down: number, across: number) => {
    const to = stepped(state, down, across);
    return <button type="button" aria-label={name} title={name} aria-disabled={!to} onClick={() => to && change(to)}>{mark}</button>; // `disabled` would lose the focus
  };
  return (
    <nav class="inview" aria-label={steps.label}>
      {step("←", steps.left, 0, -1)}
      {step("↑", steps.up, -1, 0)}
      <h2 id="head-title" tabIndex={-1} aria-live="polite">{texts.names.title(nameOf(drawn.layer, drawn.head))}</h2>
      {step("↓", steps.down, 1, 0)}
      {step("→", steps.right, 0, 1)}
    </nav>
  );
}

/** The next head in a layer, or the nearest one in the next layer; null at the end. */
export function stepped(state: State, down: number, across: number): Partial<State> | null {
  const [layer, head] = [state.layer + down, state.head + across];
  const there = (down || across) && layer >= 0 && layer < data.layers.length && head >= 0 && (down || head < data.layers[layer].heads);
  return there ? opened(state, layer, head) : null;
}

/** Whether the maps of two layers have the same bins. */
export function alike(one: Layer, other: Layer): boolean {
  return one.map?.rows === other.map?.rows && one.map?.columns === other.map?.columns;
}

/** Another head: the selection and the zoom stay if its map has the same bins. */
export function opened(state: State, layer: number, head: number): Partial<State> {
  const [from, to] = [data.layers[state.layer], data.layers[layer]];
  const rest = alike(from, to) ? {} : { row: null, column: null, zoom: [1, 0.5, 0.5] as State["zoom"] };
  return { layer, head: Math.min(head, to.heads - 1), ...rest };
}

// ---------------------------------------------------------------- under the map

export function Legend({ layer, field: of, state, tile }: { layer: Layer; field: Field; state: State; tile?: Tile | null }) {
  const low = of.signed ? figure(-of.top) : state.scale === "log" ? texts.legend.atMost(figure(of.top / 1e4)) : figure(0);
  const scale = of.signed ? "linear" : state.scale;
  const what = of.signed ? "difference" : (tile ? isExact(tile) : layer.map!.exact) ? "weight" : of.pool;
  const codes = 2 ** data.bits - 1;
  return (
    <p class="hint legend">
      <Bar what={texts.legend.what(what, scale)} low={low} high={of.above ? texts.legend.orMore(figure(of.top)) : figure(of.top)} colours={state.colours} signed={of.signed} />
      {tile ? <span class="binning">{texts.legend.visiblePart}</span> : <span class="binning" title={texts.legend.bits(data.bits, codes)}>{[binning(layer, of.pool), data.bits === 8 && texts.legend.rough, noDetail(layer, state) && texts.legend.noDetail].filter(Boolean).join(" ")}</span>}
    </p>
  );
}

/** Whether the zoom is closer than the bins of the map, so that it adds no detail. */
function noDetail(layer: Layer, state: State): boolean {
  const pooled = !layer.map!.exact && layer.lengths !== null && layer.lengths[1] > layer.map!.columns;
  return pooled && state.zoom[0] > 1 && !served(layer, state.head);
}

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
  change: Props["change"];
  over: number | null;
  setOver: (at: number | null) => void;
}

function Pinned({ head, ...rest }: Pointed & { head: Head }) {
  const { layer, field: of, state, change } = rest;
  const { row, column } = state;
  const clear = () => {
    document.querySelector<HTMLElement>(".map canvas")!.focus({ preventScroll: true }); // the button disappears
    change({ row: null, column: null });
  };
  return (
    <div class="pinned">
      <h3><SelectedTitle layer={layer} row={row} column={column} /></h3>
      {row === null || column === null ? (
        <p class="hint">{texts.selected.none(chips(layer, state))}</p>
      ) : (
        <p aria-live="polite">
          {state.cell && <Exact layer={layer} head={state.head} at={state.cell} />}
          <Cell {...{ layer, head, field: of, row, column }} />{" "}
          <button type="button" aria-label={texts.selected.clearLabel} onClick={clear}>{texts.selected.clear}</button>
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
function Ranks({ layer, field: of, state, change }: { layer: Layer; field: Field; state: State; change: Props["change"] }) {
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
  const hoverRow = over === null ? null : binAt(layer, "query", over - queryAt(layer, 0));
  const row = hoverRow !== null && over! >= queryAt(layer, 0) ? hoverRow : state.row ?? layer.map!.rows - 1;
  const column = over === null ? state.column ?? layer.map!.columns - 1 : binAt(layer, "key", over);
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
            pin={() => change(pinOf(layer, at, state))} />
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

/** The bins of a token as a query and of its strongest key; of a token that is no query, its bin as a key. */
function strongestOf(layer: Layer, at: number, state: State): { row: number | null; column: number | null } {
  const bins = tokenBins(layer, at, { row: null });
  const map = known(state.layer, state.head)?.map;
  if (!map || bins.row === null) return bins;
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

// ---------------------------------------------------------------- right of the map

function Largest({ layer, head, change }: { layer: Layer; head: Head; change: Props["change"] }) {
  if (head.edges.length === 0) return null;
  const zoomTo = (query: number, key: number) => {
    const [row, column] = [binAt(layer, "query", query), binAt(layer, "key", key)];
    if (row === null || column === null) return;
    change({ row, column });
  };
  return (
    <details>
      <summary>{texts.strongest.summary(head.edges.length)}</summary>
      <ol class="largest">
        {head.edges.map((edge) => (
          <li key={`${edge.run}.${edge.entry}.${edge.query}.${edge.key}`}>
            <button type="button" onClick={() => zoomTo(edge.query, edge.key)}>
              <b>{figure(edge.p)}</b> <bdi>{pair(layer, edge.query, edge.key, edge.run, edge.entry)}</bdi>
            </button>
          </li>
        ))}
      </ol>
    </details>
  );
}

export function Figures({ layer, head }: { layer: number; head: number }) {
  const statistics = data.statistics[layer];
  const names = data.names.filter((each) => (statistics[each.name]?.count[head] ?? 0) > 0);
  const patterns = (data.patterns[layer]?.[head] ?? []).slice(0, 3);
  const columns = (["mean", "std", "min", "max"] as const).filter((what) => names.some(({ name }) => statistics[name][what][head] !== null));
  return (
    <div>
      <h3>{texts.head.statistics}</h3>
      {patterns.length > 0 && (
        <p>
          {fill(texts.head.patternMatch, { list: patterns.map(([name, score, rows, exact], n) => (
            <span key={name} title={data.patternWords[name]}>
              {n > 0 && ", "}<b><Term name={name}>{texts.patternNames[name] ?? name}</Term></b> {exact ? "" : texts.head.about}{percent(score)} <small>({counted(rows, UNIT)})</small>
            </span>
          )) })} <small>{texts.head.patternScale}</small>
        </p>
      )}
      <div class="scroll" tabIndex={0} role="region" aria-label={texts.head.statisticsOf}>
        <table>
          <thead><tr><th scope="col">{texts.head.columns.query}</th>{columns.map((what) => <th scope="col" key={what}>{texts.head.columns[what]}</th>)}<th scope="col">{texts.head.columns.count}</th></tr></thead>
          <tbody>
            {names.map(({ name, heading, meaning }) => (
              <tr key={name} data-name={name}>
                <th scope="row" title={meaning}><Term name={name}>{heading}</Term></th>
                {columns.map((what) => <td key={what}>{figure(statistics[name][what][head])}</td>)}
                <td>{whole(statistics[name].count[head] ?? 0)}</td>
              </tr>
            ))}
          </tbody>
        </table>
      </div>
      <Meanings names={names} />
    </div>
  );
}

