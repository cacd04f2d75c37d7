// One head opened large: its map, the selected cell, the tokens, its strongest connections and its statistics.

import { useEffect, useLayoutEffect, useMemo, useRef, useState } from "preact/hooks";
import { BandLegend } from "./bands";
import { data, FULL, type Head, hasPatches, head as decoded, known, type Layer, queryAt, readable } from "./data";
import { UNIT } from "./describe";
import { embedded, heldWindows } from "./exact";
import { type Field, field } from "./field";
import { Term } from "./glossary";
import { bestPattern } from "./grid";
import { Bar } from "./legend";
import { Largest } from "./largest";
import { LayerStrip } from "./layer_strip";
import { MapView, type Zoom } from "./map";
import { alsoOf, degreeOf, followsUnscored, isCausal, isScored, NAMED } from "./naming";
import { Images, Regions } from "./picture";
import { ImageTokens } from "./image_tokens";
import { Keys } from "./reading";
import { useMore, useRoom } from "./screen";
import type { State } from "./state";
import { SegmentTable } from "./segments";
import { Pinned, strongestOf } from "./selection";
import { hasStrips, Strips as Band, Top } from "./strips";
import { Meanings } from "./table";
import { asField, isExact, MOST_PAIRS_HERE, served, type Tile } from "./tiles";
import * as texts from "./texts";
import { counted, figure, fill, percent, whole } from "./texts";
import { Why } from "./why";
import { binning, ending, isClear, nameOf, statistic, windowsOf, withoutFirst } from "./words";

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
  const marked = over === null ? state : strongestOf(layer, over, state); // as a click would select
  const zoom: Zoom = useMemo(() => ({ at: state.zoom, change: (at) => change({ zoom: at }) }), [state.zoom, change]);
  useLayoutEffect(() => drawn?.({ layer: state.layer, head: state.head }), [state.layer, state.head]);
  const section = useRef<HTMLElement>(null);
  const canvas = useRef<HTMLDivElement>(null);
  const room = useRoom(canvas);
  const beside = useRef<HTMLDivElement>(null);
  useMore(beside);
  useLayoutEffect(() => { // a token that is removed under the pointer fires no mouseleave
    if (over !== null && !section.current!.querySelector(".strip:is(:hover, :focus-within)")) setOver(null);
  });
  const title = nameOf(state.layer, state.head);
  const pin = (row: number | null, column: number | null, cell?: [number, number]) => {
    if (beside.current) beside.current.scrollTop = 0; // what is selected is described there
    change({ row, column, cell: cell ?? null });
  };
  const [tile, setTile] = useState<Tile | null>(null);
  return (
    <section aria-labelledby="head-title" ref={section}>
      <div class="head-top">
        <Likeness layer={state.layer} head={state.head} />
        {data.layers[asked.layer].heads > 1 && <LayerStrip state={asked} theme={theme} open={(head) => changed(opened(asked, asked.layer, head))} />}
      </div>
      {layer.map === null && <NoMap />}
      {data.image && layer.map && !hasPatches(layer) && <p class="hint">{texts.head.notPatches}</p>}
      {data.image && hasPatches(layer) && layer.map && !single(layer) && <p class="hint">{texts.head.pooledPatches(layer.lengths![1])}</p>}
      {shown && found?.map && hasPatches(layer) && single(layer) && <Images {...{ layer, map: found.map, field: shown, state, theme, change }} />}
      {shown && <ImageTokens {...{ layer, field: shown, state, theme, change }} />}
      <div class="panes">
        {shown && found && (
          <div ref={canvas} class="drawing">
            {hasPatches(layer) && <h3>{texts.head.fullMap}</h3>}
            <Legend {...{ layer, field: tile ? asField(tile, state.pool) : shown, state, tile, change }} />
            <BandLegend layer={layer} />
            <MapView
              {...{ layer, head: found, field: shown, scale: state.scale, colours: state.colours, zoom, theme, pin }}
              number={state.head} window={alone(layer, state)} row={marked.row} column={marked.column} cell={over === null ? state.cell : null} inSight={setTile} most={1400} room={room} title={title}
              exports={`headscope-layer-${state.layer}-head-${state.head}`} about={bestPattern(state)}
            />
          </div>
        )}
        <div class="beside" ref={beside} tabIndex={0} role="region" aria-label={texts.head.beside}>
          {shown && found && <Pinned {...{ layer, head: found, field: shown, state, change, over, setOver }} />}
          {shown && found && listed(layer) && (
            <Keys place={[state.layer, state.head]} head={found} at={queryAt(layer, marked.row ?? shown.rows - 1)} colour="--profile" title={state.sink ? texts.head.largestOthers : texts.head.largestKeys} shown={shown} go={(key) => change({ row: marked.row ?? shown.rows - 1, column: key })} />
          )}
          {shown && found && <Why {...{ layer, head: found, state, change }} />}
          {found?.top && !listed(layer) && state.row !== null && <Top key={`${state.row} ${state.cell}`} layer={layer} top={found.top} row={state.row} cell={state.cell} />}
          {found && <Largest {...{ layer, head: found, change }} number={state.head} />}
          {data.image && <Regions layer={state.layer} head={state.head} />}
          <SegmentTable layer={layer} head={state.head} colours={state.colours} />
          <Figures layer={state.layer} head={state.head} />
        </div>
      </div>
      {hasStrips(layer) && !layer.map?.exact && <Band {...{ layer, state, theme, change }} />}
    </section>
  );
}

/** The window that the map shows alone; null where it merges all windows. */
function alone(layer: Layer, state: State): number | null {
  return state.alone && canBeAlone(layer, state.head, state.window) ? state.window : null;
}

function canBeAlone(layer: Layer, head: number, window: number): boolean {
  const lengths = embedded(layer, head, window)?.lengths;
  return windowsOf(layer) > 0 && lengths !== undefined && lengths[0] * lengths[1] <= MOST_PAIRS_HERE;
}

/** Whether the keys of each query are listed with the tokens around them. */
function listed(layer: Layer): boolean {
  return readable(layer) && layer.map!.exact;
}

/** Whether each key and query has a bin of its own. */
export function single({ map, lengths }: Layer): boolean {
  return map !== null && lengths !== null && map.rows === lengths[0] && map.columns === lengths[1];
}

/** The region of the image that the head looks at most, in a sentence. */
function Region({ look, fixed }: { look: [string, number] | null | undefined; fixed: boolean }) {
  const { noRegion } = texts.image;
  const mostRegion = fixed ? texts.image.fixedRegion : texts.image.mostRegion;
  if (!isClear(look)) return <p class="likeness">{noRegion}</p>;
  return <p class="likeness" title={data.image!.regionWords[look[0]].meaning}>{fill(mostRegion(look[1]), { region: <b>{texts.regionNames[look[0]] ?? look[0]}</b> })}</p>;
}

/** The pattern that the head matches best, in a sentence. */
export function Likeness(place: Place) {
  return <><Named {...place} />{followsUnscored(place).map((name) => <Unscored key={name} {...place} name={name} />)}</>;
}

/** A pattern that the head seems to follow, where too few rows show it for a score. */
function Unscored({ layer, head, name }: Place & { name: string }) {
  const { rows, of, needs } = data.few![name];
  const { kind } = texts.patterns[name](UNIT);
  return <p class="likeness unscored">{fill(texts.head.unscored(whole(rows), whole(of), whole(needs), figure(statistic(layer, head, name), 2), isCausal()), { kind: <b><Term name={name}>{kind}</Term></b> })}</p>;
}

function Named({ layer, head }: Place) {
  if (data.image && data.image.looks.length > 0 && data.patterns[layer]?.[head]?.[0]?.[0] !== "fixed key") return <Region look={data.image.looks[layer]?.[head]} fixed={data.image.fixed?.[layer]?.[head] ?? false} />;
  const best = data.patterns[layer]?.[head]?.[0];
  if (!best && !isScored()) return null;
  const [name, score, rows] = best ?? ["", 0, 0];
  if (score < NAMED) return <p class="likeness" title={texts.head.noPatternHelp}>{texts.head.noPattern}</p>;
  const { kind, does } = texts.patterns[name]?.(UNIT) ?? { kind: name, does: data.patternWords[name] };
  return (
    <p class="likeness" title={texts.head.likenessHelp}>
      {fill(texts.head.likeness[degreeOf(score)], { kind: <b><Term name={name}>{kind}</Term></b>, match: percent(score), rows: counted(rows, UNIT) + alsoOf({ layer, head }), does })}
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

interface LegendProps {
  layer: Layer;
  head?: number;
  field: Field;
  state: State;
  tile?: Tile | null;
  change?: Props["change"]; // where the reader can select what cells show
}

export function Legend({ layer, field: of, state, tile, head = state.head, change }: LegendProps) {
  const low = of.signed ? figure(-of.top) : state.scale === "log" ? texts.legend.atMost(figure(of.top / 1e4)) : figure(0);
  const scale = of.signed ? "linear" : state.scale;
  const what = of.signed ? "difference" : (tile ? isExact(tile) : layer.map!.exact) ? "weight" : of.pool;
  const windows = windowsOf(layer);
  const codes = 2 ** data.bits - 1;
  const levels = layer.map!.levels?.[head] ?? FULL;
  const [bits, rough] = levels < FULL ? [texts.legend.levels(levels), texts.legend.coarse(levels)] : [texts.legend.bits(data.bits, codes), data.bits === 8 && texts.legend.rough];
  return (
    <p class="hint legend">
      <Bar what={windows > 1 && !of.signed && !tile ? texts.legend[of.pool === "max" ? "largestOf" : "meanOf"](windows, scale) : texts.legend.what(what, scale)} low={low} high={of.above ? texts.legend.orMore(figure(of.top)) : figure(of.top)} colours={state.colours} signed={of.signed} />
      {windows > 1 && change && (!tile || tile.window !== null) && <Pools {...{ layer, head, state, change }} />}
      {tile ? <span class="binning">{texts.legend.visiblePart}</span> : <span class="binning" title={bits}>{[windows > 1 && change && !of.signed && texts.legend[of.pool === "max" ? "dark" : "pale"](windows), binning(layer, of.pool), of.signed && state.scale === "log" && texts.legend.linearAlone, !of.signed && ending(of), withoutFirst(layer, of), rough, noDetail(layer, state) && texts.legend.noDetail].filter(Boolean).join(" ")}</span>}
    </p>
  );
}

const MOST_ALONE = 4; // windows with a button each

/** What the cells of merged windows show, or one window alone. */
function Pools({ layer, head, state, change }: { layer: Layer; head: number; state: State; change: Props["change"] }) {
  const shown = alone(layer, state);
  const held = state.sink ? [] : heldWindows(layer, head).filter((window) => canBeAlone(layer, head, window));
  const offered = held.length <= MOST_ALONE ? held : held.includes(state.window) ? [state.window] : held.slice(0, 1);
  return (
    <span role="group" aria-label={texts.controls.pool} class="pools">
      {(["mean", "max"] as const).map((pool) => <button type="button" key={pool} aria-pressed={shown === null && state.pool === pool} onClick={() => change({ pool, alone: false })}>{texts.controls.pools[pool]}</button>)}
      {offered.map((window) => <button type="button" key={window} aria-pressed={shown === window} title={texts.legend.aloneHelp(window)} onClick={() => change({ window, alone: true, cell: window === state.window ? state.cell : null })}>{texts.names.inWindow(window)}</button>)}
    </span>
  );
}

/** Whether the zoom is closer than the bins of the map, so that it adds no detail. */
function noDetail(layer: Layer, state: State): boolean {
  const pooled = !layer.map!.exact && layer.lengths !== null && layer.lengths[1] > layer.map!.columns;
  return pooled && state.zoom[0] > 1 && !served(layer, state.head);
}

// ---------------------------------------------------------------- right of the map

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
            <span key={name} title={[data.patternWords[name], texts.head.patternScale, ...(name in statistics ? [texts.head.matchAndMean] : [])].join(" ")}>
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

