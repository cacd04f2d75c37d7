// How much weight flows between the named segments of the input: for one head as a table, for all heads as a picture.

import { useRef } from "preact/hooks";
import { hasBands, Swatch } from "./bands";
import { data, type Layer, onOtherData } from "./data";
import { all, bestPattern, isWeak, type Place } from "./grid";
import { colour } from "./field";
import { coloursOn, type Figure, origin, type Paper, tabular } from "./figure";
import { FigureMenu } from "./figure_menu";
import { barOf, titled } from "./figures";
import { useRoving } from "./roving";
import type { State } from "./state";
import { figures, grid, NO_VALUE, percent, segments as texts, whole } from "./texts";
import { layerName, nameOf } from "./words";

const NONE = 0xffff;
const LISTED = 10;

const decoded = new Map<string, Uint16Array>();

/** The share of the weight of the rows of a segment that is on keys of a segment, as a mean; or what an even spread would give. Null
 * where there are no such rows, or where it is unknown. */
function share(layer: Layer, head: number, from: number, to: number, which: "mean" | "even" | "withoutFirst" = "mean"): number | null {
  const size = layer.segments!.names.length;
  const text = layer.segments![which] ?? null;
  if (text === null) return null;
  const key = `${which}${layer.index}`;
  let codes = decoded.get(key);
  if (!codes) {
    const bytes = Uint8Array.from(atob(text), (each) => each.charCodeAt(0));
    decoded.set(key, (codes = new Uint16Array(bytes.buffer)));
  }
  const code = codes[(head * size + from) * size + to];
  return code === NONE ? null : code / (NONE - 1);
}

const FIRST_LAYER = data.layers.find((layer) => layer.segments !== null);

const CLEAR = 1.2; // times the even share, or that part of it: as for regions of an image
const LEAST_DIFFERENCE = 0.01;

const flags = new Map<number, string>();
onOtherData(() => (decoded.clear(), flags.clear()));

/** Whether chance does not explain a share: by its spread if that is known, else by the distance from an even share. True where both are
 * unknown. */
function isTelling(layer: Layer, head: number, from: number, to: number): boolean {
  const [value, even] = [share(layer, head, from, to), share(layer, head, from, to, "even")];
  if (value === null || even === null) return value !== null;
  if (Math.abs(value - even) < LEAST_DIFFERENCE) return false;
  const { clear, names } = layer.segments!;
  if (!clear) return value >= CLEAR * even || value * CLEAR <= even;
  if (!flags.has(layer.index)) flags.set(layer.index, atob(clear));
  return flags.get(layer.index)!.charCodeAt((head * names.length + from) * names.length + to) === 1;
}

const MOST_LEFT = 2 / 3; // of a share, without the first token: where more is left, that token does not explain the share

/** The share without the first token, where that token has a third of the share or more. */
function rest(layer: Layer, head: number, from: number, to: number): number | null {
  const [value, without] = [share(layer, head, from, to), share(layer, head, from, to, "withoutFirst")];
  return value !== null && without !== null && without <= MOST_LEFT * value && value - without >= LEAST_DIFFERENCE ? without : null;
}

function cell(value: number | null, telling: boolean, colours: State["colours"]) {
  if (value === null || !telling) return {};
  const { fill, white } = colour(value, colours);
  return { background: fill, color: white ? "white" : "black" };
}

/** The table of one head: a row for the segment of the queries, a column for that of the keys. */
export function SegmentTable({ layer, head, colours }: { layer: Layer; head: number; colours: State["colours"] }) {
  if (!layer.segments) return null;
  const { names } = layer.segments;
  return (
    <div class="segments">
      <h3>{texts.title}</h3>
      <div class="scroll" tabIndex={0} role="region" aria-label={texts.tableOf(nameOf(layer.index, head))}>
        <table>
          <thead><tr><th scope="col">{texts.corner}</th>{names.map((name, to) => <th scope="col" key={to}>{hasBands(layer) && <Swatch segment={to} />} <bdi>{name}</bdi></th>)}</tr></thead>
          <tbody>
            {names.map((name, from) => (
              <tr key={from}>
                <th scope="row">{hasBands(layer) && <Swatch segment={from} />} <bdi>{name}</bdi></th>
                {names.map((_, to) => {
                  const [value, even, without] = [share(layer, head, from, to), share(layer, head, from, to, "even"), rest(layer, head, from, to)];
                  const telling = isTelling(layer, head, from, to);
                  return (
                    <td key={to} style={cell(value, telling, colours)} class={telling ? "" : "dim"}>
                      {value === null ? NO_VALUE : percent(value)}{value !== null && even !== null && <small>{texts.even(percent(even), layer.segments!.evenExact)}</small>}
                      {without !== null && <small class="without">{texts.withoutShare(percent(without))}</small>}
                    </td>
                  );
                })}
              </tr>
            ))}
          </tbody>
        </table>
      </div>
      <p class="tools"><FigureMenu of={figures.segmentsOf(nameOf(layer.index, head))} make={(paper) => tableFigure(layer, head, colours, paper)} /></p>
      <p class="hint">{texts.hint} {layer.segments.even !== null && `${texts.evenHint} ${texts.pale((layer.segments.clear ?? null) !== null)}`} {names.some((_, from) => names.some((_, to) => rest(layer, head, from, to) !== null)) && texts.withoutHint}</p>
    </div>
  );
}

function tableFigure(layer: Layer, head: number, palette: State["colours"], paper: Paper): Figure {
  const { names } = layer.segments!;
  const colours = coloursOn(palette, paper.dark);
  return {
    name: `headscope-layer-${layer.index}-head-${head}-segments`,
    title: titled(nameOf(layer.index, head), bestPattern({ layer: layer.index, head })),
    caption: [...origin(), texts.hint],
    body: tabular(names, names, [texts.corner, texts.keyIn], (from, to) => share(layer, head, from, to), colours, paper),
    bar: barOf({ top: 1, signed: false, above: false }, "weight", "linear", colours),
  };
}

function headsFigure(names: string[], from: number, to: number, leavesOut: boolean, palette: State["colours"], paper: Paper): Figure {
  const colours = coloursOn(palette, paper.dark);
  const layers = data.layers.filter((layer) => sameNames(layer, names));
  const heads = Array.from({ length: Math.max(...layers.map((layer) => layer.heads)) }, (_, head) => String(head));
  return {
    name: "headscope-segments",
    title: texts.fromTo(names[from], names[to]) + (leavesOut ? `, ${texts.without}` : ""),
    caption: [...origin(), texts.headsHint(names[from], names[to])],
    body: tabular(layers.map((layer) => layer.short), heads, [grid.layer, grid.head], (n, head) => (head < layers[n].heads ? share(layers[n], head, from, to, leavesOut ? "withoutFirst" : "mean") : null), colours, paper),
    bar: barOf({ top: 1, signed: false, above: false }, "weight", "linear", colours),
  };
}

interface Props {
  state: State;
  change: (part: Partial<State>) => void;
  open: (place: Place) => void;
}

/** Every head, coloured by the share that flows from one segment to another. */
export function SegmentView({ state, change, open }: Props) {
  const { names } = FIRST_LAYER!.segments!;
  const [from, to] = [Math.min(state.segmentFrom ?? names.length - 1, names.length - 1), Math.min(state.segmentTo, names.length - 1)];
  const places = all().filter(({ layer }) => sameNames(data.layers[layer], names));
  const canLeaveOut = places.some(({ layer }) => (data.layers[layer].segments!.withoutFirst ?? null) !== null && data.layers[layer].segments!.holders.includes(to));
  const leavesOut = canLeaveOut && !state.segmentFirst;
  const value = ({ layer, head }: Place) => share(data.layers[layer], head, from, to, leavesOut ? "withoutFirst" : "mean");
  const isClearAt = (place: Place) => leavesOut ? value(place) !== null : isTelling(data.layers[place.layer], place.head, from, to);
  const evenOf = ({ layer, head }: Place) => share(data.layers[layer], head, from, to, "even");
  const evens = places.map(evenOf).filter((each) => each !== null);
  const best = places.map((place) => ({ place, value: value(place) })).filter((each) => each.value !== null).sort((a, b) => b.value! - a.value!).slice(0, LISTED);
  const table = useRef<HTMLTableElement>(null);
  const roving = useRoving(table, "button");
  const picker = (label: string, at: number, choose: (at: number) => void) => (
    <label>{label}{" "}
      <select value={at} onChange={(event) => choose(Number(event.currentTarget.value))}>
        {names.map((name, n) => <option key={n} value={n}>{name}</option>)}
      </select>
    </label>
  );
  return (
    <section aria-labelledby="segments-title">
      <h2 id="segments-title">{texts.title}</h2>
      <p class="switches">
        {picker(texts.from, from, (at) => change({ segmentFrom: at }))}
        {picker(texts.to, to, (at) => change({ segmentTo: at }))}
        {canLeaveOut && <label><input type="checkbox" checked={!state.segmentFirst} onChange={(event) => change({ segmentFirst: !event.currentTarget.checked })} /> {texts.without}</label>}
        <FigureMenu of={figures.segmentsOfAll} make={(paper) => headsFigure(names, from, to, leavesOut, state.colours, paper)} />
      </p>
      <p class="hint">{texts.viewHint} {leavesOut ? `${texts.withoutHint} ${texts.withoutChance}` : evens.length > 0 && `${texts.viewEven(percent(evens.reduce((a, b) => a + b, 0) / evens.length))} ${texts.pale((FIRST_LAYER!.segments!.clear ?? null) !== null)}`}</p>
      <div class="segment-columns">
        <div class="scroll" tabIndex={0} role="region" aria-label={texts.allHeads}>
          <table class="segment-heads" ref={table} {...roving}>
            <thead>
              <tr>
                <th scope="col">{texts.layerAndHead}</th>
                {Array.from({ length: Math.max(...places.map(({ head }) => head)) + 1 }, (_, head) => <th scope="col" key={head}>{head}</th>)}
              </tr>
            </thead>
            <tbody>
              {data.layers.map((layer) => sameNames(layer, names) && (
                <tr key={layer.index}>
                  <th scope="row">{layerName(layer.index)}</th>
                  {Array.from({ length: layer.heads }, (_, head) => {
                    const place = { layer: layer.index, head };
                    const p = value(place);
                    const text = p === null ? NO_VALUE : percent(p);
                    const even = evenOf(place);
                    return (
                      <td key={head}>
                        <button type="button" style={cell(p, isClearAt(place), state.colours)} class={isClearAt(place) ? "" : "dim"} title={even === null || leavesOut ? undefined : texts.evenTip(percent(even))} aria-label={texts.cell(nameOf(layer.index, head), text)} onClick={() => open({ layer: layer.index, head })}>{text}</button>
                      </td>
                    );
                  })}
                </tr>
              ))}
            </tbody>
          </table>
        </div>
        <div>
          <h3>{texts.most(names[from], names[to])}</h3>
          <ol class="ranks">
            {best.map(({ place, value: p }) => (
              <li key={`${place.layer}.${place.head}`} class={isClearAt(place) ? "" : "dim"}>
                <button type="button" onClick={() => open(place)}>{nameOf(place.layer, place.head)}</button>
                <span class="meter" aria-hidden="true"><i style={{ width: `${100 * p!}%` }} /></span>
                <span>{percent(p!)} {!leavesOut && rest(data.layers[place.layer], place.head, from, to) !== null && <small>{texts.withoutShare(percent(rest(data.layers[place.layer], place.head, from, to)!))} · </small>}{!isWeak(place) && <small>{bestPattern(place)}</small>}</span>
              </li>
            ))}
          </ol>
          {!canLeaveOut && best.some(({ place }) => readsFirst(place, to)) && <p class="hint">{texts.firstToken(names[to])}</p>}
          <p class="hint">{texts.rows(whole(Math.max(...places.map(({ layer, head }) => data.layers[layer].segments!.rows[head][from]))), names[from])}</p>
        </div>
      </div>
    </section>
  );
}

/** Whether a head is named after the first token, and that token belongs to a segment. */
function readsFirst(place: Place, segment: number): boolean {
  const holdsFirst = data.layers[place.layer].segments!.spans.some(([of, start]) => of === segment && start === 0);
  return holdsFirst && !isWeak(place) && data.patterns[place.layer]?.[place.head]?.[0]?.[0] === "first";
}

function sameNames(layer: Layer, names: string[]): boolean {
  return layer.segments !== null && layer.segments.names.join("\n") === names.join("\n");
}
