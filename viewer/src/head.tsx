// One head opened large: its map, what is known of the pinned cell, the tokens, its largest weights and its figures.

import { useEffect, useLayoutEffect, useMemo, useRef, useState } from "preact/hooks";
import { data, type Head, hasPatches, hasTexts, head as decoded, known, type Layer, queryAt, token } from "./data";
import { type Colours, colour, type Field, field, place, type Scale } from "./field";
import { Bar } from "./legend";
import { Cell, Exact, MapView, type Zoom } from "./map";
import { Images, Regions } from "./picture";
import type { State } from "./state";
import { hasStrips, Strips as Band, Top } from "./strips";
import { Meanings } from "./table";
import { asField, isExact, served, type Tile } from "./tiles";
import { bin, binAt, binning, counted, figure, kept, nameOf, pair, whole } from "./words";

interface Props {
  state: State;
  theme: string;
  change: (part: Partial<State>) => void;
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

/** What to show: until these heads are decoded still the last ones, in the state that they were shown in. Of a change meant
 * for them a zoom alone is heard, if the next ones keep it: a pinned bin might be none of theirs. */
export function useShown(state: State, heads: (Head | null)[], change: Props["change"]) {
  const last = useRef({ state, heads });
  const ready = !heads.includes(null) || last.current.heads.includes(null);
  if (ready) last.current = { state, heads };
  const late: Props["change"] = ({ zoom }) => zoom && state.zoom === last.current.state.zoom && change({ zoom });
  return { ...last.current, change: ready ? change : late };
}

export function HeadView({ state: asked, theme, change: changed }: Props) {
  const { state, heads: [found], change } = useShown(asked, [useHead(asked.layer, asked.head)], changed);
  const layer = data.layers[state.layer];
  const shown = useMemo(
    () => (found?.map ? field(found.map, state.pool, state.sink, layer.map!.exact) : null),
    [found, state.pool, state.sink],
  );
  const [over, setOver] = useState<number | null>(null); // a token that is pointed at
  const marked = over === null ? state : tokenBins(layer, over, state);
  const zoom: Zoom = useMemo(() => ({ at: state.zoom, change: (at) => change({ zoom: at }) }), [state.zoom, change]);
  const section = useRef<HTMLElement>(null);
  useLayoutEffect(() => { // a token that went from under the pointer was not left
    if (over !== null && !section.current!.querySelector(".strip:is(:hover, :focus-within)")) setOver(null);
  });
  const title = nameOf(state.layer, state.head);
  const pin = (row: number | null, column: number | null, cell?: [number, number]) => change({ row, column, cell: cell ?? null });
  const [tile, setTile] = useState<Tile | null>(null);
  return (
    <section aria-labelledby="head-title" ref={section}>
      <div class="heading">
        <h2 id="head-title" tabIndex={-1} aria-live="polite">{title.replace(/^layer /, "Layer ")}</h2>
        <Steps state={asked} change={changed} />
      </div>
      <Likeness layer={state.layer} head={state.head} />
      {layer.map === null && <NoMap />}
      {data.image && layer.map && !hasPatches(layer) && <p class="hint">Its keys are not the patches of the image.</p>}
      {data.image && hasPatches(layer) && layer.map && !single(layer) && <p class="hint">The map holds several patches in a bin: observe with map= at least the number of keys to lay it over the image.</p>}
      {shown && found?.map && hasPatches(layer) && single(layer) && <Images {...{ layer, map: found.map, field: shown, state, theme, change }} />}
      <div class="panes">
        {shown && found && (
          <div>
            {hasPatches(layer) && <h3>The whole map, patch by patch in reading order</h3>}
            <Legend {...{ layer, field: tile ? asField(tile, state.pool) : shown, state, tile }} />
            <MapView
              {...{ layer, head: found, field: shown, scale: state.scale, colours: state.colours, zoom, theme, pin }}
              number={state.head} row={marked.row} column={marked.column} cell={over === null ? state.cell : null} inSight={setTile} most={600} title={title}
              exports={`headscope-layer-${state.layer}-head-${state.head}`}
            />
          </div>
        )}
        <div class="beside">
          {shown && found && <Pinned {...{ layer, head: found, field: shown, state, change, over, setOver }} />}
          {found?.top && state.row !== null && <Top key={`${state.row} ${state.cell}`} layer={layer} top={found.top} row={state.row} cell={state.cell} />}
          {found && <Largest {...{ layer, head: found, change }} />}
          {data.image && <Regions layer={state.layer} head={state.head} />}
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

const WEAK = 0.3; // a pattern's score below this says that nothing fits

/** What the head is likest to, in a sentence. */
function Likeness({ layer, head }: { layer: number; head: number }) {
  const best = data.patterns[layer]?.[head]?.[0];
  if (!best) return null;
  const [name, score, rows] = best;
  return (
    <p class="likeness">{score < WEAK ? "No pattern fits well; the closest is " : "Closest to "}
      <b>{name}</b>: {data.patternWords[name]}. Score {figure(score)} of 1 on {counted(rows, "row")}. <small>A likeness, not a purpose.</small></p>
  );
}

export function NoMap() {
  return <p class="hint">No map was recorded. Observe with Observe(map=64) to see where the weight lies.</p>;
}

function Steps({ state, change }: Pick<Props, "state" | "change">) {
  const step = (name: string, down: number, across: number) => {
    const to = stepped(state, down, across);
    return <button type="button" aria-disabled={!to} onClick={() => to && change(to)}>{name}</button>; // a disabled one loses the focus
  };
  return <p class="steps">{step("↑ layer", -1, 0)} {step("↓ layer", 1, 0)} {step("← head", 0, -1)} {step("→ head", 0, 1)}</p>;
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

/** Another head: what is pinned and the zoom stay where its map has the same bins. */
export function opened(state: State, layer: number, head: number): Partial<State> {
  const [from, to] = [data.layers[state.layer], data.layers[layer]];
  const rest = alike(from, to) ? {} : { row: null, column: null, zoom: [1, 0.5, 0.5] as State["zoom"] };
  return { layer, head: Math.min(head, to.heads - 1), ...rest };
}

// ---------------------------------------------------------------- under the map

export function Legend({ layer, field: of, state, tile }: { layer: Layer; field: Field; state: State; tile?: Tile | null }) {
  const low = of.signed ? figure(-of.top) : state.scale === "log" ? `≤ ${figure(of.top / 1e4)}` : "0";
  const scale = of.signed ? "linear" : state.scale;
  const what = of.signed ? "difference" : (tile ? isExact(tile) : layer.map!.exact) ? "weight" : `${of.pool} of a bin`;
  const codes = 2 ** data.bits - 1;
  return (
    <p class="hint legend">
      <Bar what={`${what}, ${scale}`} low={low} high={`${figure(of.top)}${of.above ? " and more" : ""}`} colours={state.colours} signed={of.signed} />
      {tile ? <span class="binning">A scale for what is in sight alone.</span> : <span class="binning" title={`Kept in ${data.bits} bits: value = largest × (c / ${whole(codes)})², within ${(1 / codes).toPrecision(1)} of the largest.`}>{binning(layer)}{data.bits === 8 && " What has ≈ is kept in 8 bits."}{zoomed(layer, state)}</span>}
    </p>
  );
}

/** Said where one looks closer than the page can show. */
function zoomed(layer: Layer, state: State): string {
  const pooled = !layer.map!.exact && layer.lengths && layer.lengths[1] > layer.map!.columns;
  return pooled && state.zoom[0] > 1 && !served(layer) ? " Zooming in shows these bins larger; the page holds nothing finer." : "";
}

/** The bins of a token as query and as key; as query those that were, where it is none. */
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
  const unpin = () => {
    document.querySelector<HTMLElement>(".map canvas")!.focus({ preventScroll: true }); // the button goes
    change({ row: null, column: null });
  };
  return (
    <div class="pinned">
      <h3>Pinned</h3>
      {row === null || column === null ? (
        <p class="hint">Click a cell{chips(layer, state) && ", or a token below,"} to pin it: its row is where a query looks, its column who looks at a key.</p>
      ) : (
        <p aria-live="polite">
          {state.cell && <Exact layer={layer} head={state.head} at={state.cell} />}
          <Cell {...{ layer, head, field: of, row, column }} />{" "}
          <button type="button" onClick={unpin}>Unpin</button>
        </p>
      )}
      {layer.map!.ranges && (chips(layer, state) ? <Strips {...rest} /> : <Ranks {...{ layer, field: of, state, change }} />)}
    </div>
  );
}

const CHIPS = 160;

/** Whether as few tokens are in sight as there is room for. */
function chips(layer: Layer, state: State): boolean {
  return hasTexts(layer) && Math.max(...layer.lengths!) / state.zoom[0] <= CHIPS;
}

/** The bins of the pinned row and column with the largest values, where there are too many keys to show all. */
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
      <span>{kept(p)}</span>
    </li>
  );
  return (
    <>
      <h4>Where it looks: <bdi>{bin(layer, "query", row)}</bdi></h4>
      <ol class="ranks">{keys.map(line("key"))}</ol>
      <h4>Who looks at it: <bdi>{bin(layer, "key", column)}</bdi></h4>
      <ol class="ranks">{queries.map(line("query"))}</ol>
      <p class="hint">{layer.map!.exact ? "The largest weights" : `The bins with the largest ${of.pool}`}.{hasTexts(layer) && " Zoom in to see the tokens."}</p>
    </>
  );
}

/** The tokens that are seen, coloured by where a query looks, and by who looks at a key. */
function Strips({ layer, field: of, state, change, over, setOver }: Pointed) {
  const [k, x, y] = state.zoom;
  const keys = layer.lengths![1];
  const from = (middle: number) => Math.min(1 - 1 / k, Math.max(0, middle - 0.5 / k));
  const start = (middle: number) => Math.floor(from(middle) * keys);
  const stop = (middle: number) => Math.min(keys, Math.ceil((from(middle) + 1 / k) * keys), start(middle) + CHIPS);
  const hoverRow = over === null ? null : binAt(layer, "query", over - queryAt(layer, 0));
  const row = hoverRow !== null && over! >= queryAt(layer, 0) ? hoverRow : state.row ?? layer.map!.rows - 1;
  const column = over === null ? state.column ?? layer.map!.columns - 1 : binAt(layer, "key", over);
  const strip = (which: "key" | "query") => {
    const middle = which === "key" ? x : y;
    return (
      <div class="strip" onMouseLeave={() => setOver(null)}>
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
  const pooled = layer.map!.exact ? "" : " Colours are those of bins.";
  return (
    <>
      <h4>Where it looks{row !== null && <>: <bdi>{bin(layer, "query", row)}</bdi></>}</h4>
      {strip("key")}
      <h4>Who looks at it{column !== null && <>: <bdi>{bin(layer, "key", column)}</bdi></>}</h4>
      {strip("query")}
      <p class="hint">
        Point at a token or pin it by a click.{pooled}
      </p>
    </>
  );
}

function pinOf(layer: Layer, at: number, state: State): Partial<State> {
  const { row, column } = tokenBins(layer, at, state);
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
    <button type="button" style={style} title={`${at}: ${token(at, true)}${shown ? `, ${kept(value)}` : ""}`}
      onMouseEnter={() => over(at)} onFocus={() => over(at)} onBlur={() => over(null)} onClick={pin}>
      <bdi>{token(at)}</bdi>
    </button>
  );
}

// ---------------------------------------------------------------- beside the map

function Largest({ layer, head, change }: { layer: Layer; head: Head; change: Props["change"] }) {
  if (head.edges.length === 0) return null;
  const zoomTo = (query: number, key: number) => {
    const [row, column] = [binAt(layer, "query", query), binAt(layer, "key", key)];
    if (row === null || column === null) return;
    change({ row, column });
  };
  return (
    <details>
      <summary>The {head.edges.length === 1 ? "largest weight" : `${head.edges.length} largest weights`}, exact</summary>
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
      <h3>Figures</h3>
      {patterns.length > 1 && (
        <p>
          Patterns: {patterns.map(([name, score, rows, exact], n) => (
            <span key={name} title={data.patternWords[name]}>
              {n > 0 && ", "}<b>{name}</b> {exact ? "" : "about "}{figure(score)} <small>({counted(rows, "row")})</small>
            </span>
          ))}. <small>1 is exactly so, 0 no closer than chance.</small>
        </p>
      )}
      <div class="scroll" tabIndex={0} role="region" aria-label="Figures of this head">
        <table>
          <thead><tr><th scope="col">over rows</th>{columns.map((what) => <th scope="col" key={what}>{what}</th>)}<th scope="col">rows</th></tr></thead>
          <tbody>
            {names.map(({ name, heading, meaning }) => (
              <tr key={name} data-name={name}>
                <th scope="row" title={meaning}>{heading}</th>
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

