// How much weight flows between the named segments of the input: for one head as a table, for all heads as a picture.

import { useRef } from "preact/hooks";
import { hasBands, Swatch } from "./bands";
import { data, type Layer, onOtherData } from "./data";
import { all, bestPattern, isWeak, type Place } from "./grid";
import { colour } from "./field";
import { coloursOn, type Figure, origin, type Paper, tabular } from "./figure";
import { FigureMenu } from "./figure_menu";
import { barOf, titled } from "./figures";
import { Bar } from "./legend";
import { useRoving } from "./roving";
import type { State } from "./state";
import { figures, fill, grid, NO_VALUE, percent, segments as texts, whole } from "./texts";
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

interface Painted {
  p: number | null;
  even: number | null; // null = what chance gives is not known
  telling: boolean;
}

/** The share of a head; without the first token, where what chance gives is not known. */
function painted(layer: Layer, head: number, from: number, to: number, leavesOut = false): Painted {
  const p = share(layer, head, from, to, leavesOut ? "withoutFirst" : "mean");
  return leavesOut ? { p, even: null, telling: p !== null } : { p, even: share(layer, head, from, to, "even"), telling: isTelling(layer, head, from, to) };
}

const FAINTEST = 0.15; // of the scale of colours
const LEAST_SPAN = 0.1; // the scale of colours ends at no less than this difference from chance

/** Where the scale of colours ends: the largest difference from chance. Null where chance is not known. */
function spanOf(cells: Painted[]): number | null {
  const far = cells.filter(({ p, even }) => p !== null && even !== null).map(({ p, even, telling }) => (telling ? Math.abs(p! - even!) : 0));
  return far.length === 0 ? null : Math.max(LEAST_SPAN, ...far);
}

/** The colour of a share: blue above chance, orange below it, none within it; by the share itself where chance is not known. */
function paintOf({ p, even, telling }: Painted, span: number | null, colours: State["colours"]): { fill: string; white: boolean } | null {
  if (p === null || !telling) return null;
  if (span === null || even === null) return colour(p, colours);
  const far = Math.max(FAINTEST, Math.abs(p - even) / span); // a small difference has a colour, too
  return colour(0.5 + (Math.sign(p - even) * far) / 2, colours, "chance");
}

function styleOf(found: ReturnType<typeof paintOf>) {
  return found ? { background: found.fill, color: found.white ? "white" : "black" } : {};
}

/** What the colours mean. */
function Colouring({ span, layer, colours }: { span: number | null; layer: Layer; colours: State["colours"] }) {
  if (span === null) return null;
  const points = whole(Math.round(100 * span));
  return (
    <p class="hint legend chance">
      <Bar what={texts.scale} low={texts.below(points)} high={texts.above(points)} colours={colours} signed="chance" />
      <span class="binning"><i class="within" aria-hidden="true" /> {texts.within((layer.segments!.clear ?? null) !== null)}</span>
    </p>
  );
}

/** The figure's scale of colours. */
function barFor(span: number | null, colours: State["colours"]) {
  if (span === null) return barOf({ top: 1, signed: false, above: false }, "weight", "linear", colours);
  return { ...barOf({ top: span, signed: true, above: false }, "difference", "linear", colours), label: texts.scale, signed: "chance" as const };
}

/** The head that reads a segment most, of those that read it more than chance; and how many read it more, and less. */
function Most({ cells, name, from, to }: { cells: (Painted & { place: Place })[]; name: string; from: number; to: number }) {
  const known = cells.filter(({ p }) => p !== null).sort((a, b) => b.p! - a.p!);
  const more = known.filter(({ p, even, telling }) => even !== null && telling && p! > even);
  const less = known.filter(({ p, even, telling }) => even !== null && telling && p! < even);
  if (known.every(({ even }) => even === null)) return null;
  const first = more[0] ?? known[0];
  const facts = [name, percent(first.p!), percent(first.even ?? 0)] as const;
  const said = more.length > 0 ? texts.reads(...facts) : first.even !== null && !first.telling ? texts.readsNone(...facts) : texts.readsLess(name);
  const without = ({ layer, head }: Place) => share(data.layers[layer], head, from, to, "withoutFirst") ?? -1;
  const left = rest(data.layers[first.place.layer], first.place.head, from, to);
  const other = left === null ? first : known.reduce((most, each) => (without(each.place) > without(most.place) ? each : most), first);
  const rested = left !== null && texts.readsWithout(percent(left), other === first);
  return <p class="segment-summary">{fill(said, { head: <b>{shortOf(first.place)}</b> })} {rested && fill(rested, { other: `${shortOf(other.place)} (${percent(without(other.place))})` })} {texts.counts(more.length, less.length, known.length)}</p>;
}

function shortOf({ layer, head }: Place): string {
  const { short } = data.layers[layer];
  return /^\d+$/.test(short) ? `${short}.${head}` : nameOf(layer, head);
}

/** The table of one head: a row for the segment of the queries, a column for that of the keys. */
export function SegmentTable({ layer, head, colours }: { layer: Layer; head: number; colours: State["colours"] }) {
  if (!layer.segments) return null;
  const { names } = layer.segments;
  const of = (from: number, to: number) => painted(layer, head, from, to);
  const span = spanOf(names.flatMap((_, from) => names.map((_, to) => of(from, to))));
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
                  const [{ p: value, even, telling }, without] = [of(from, to), rest(layer, head, from, to)];
                  return (
                    <td key={to} style={styleOf(paintOf({ p: value, even, telling }, span, colours))} class={telling ? "" : "dim"}>
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
      <Colouring {...{ span, layer, colours }} />
      <p class="hint">{texts.hint} {layer.segments.even !== null && texts.evenHint} {names.some((_, from) => names.some((_, to) => rest(layer, head, from, to) !== null)) && texts.withoutHint}</p>
    </div>
  );
}

function tableFigure(layer: Layer, head: number, palette: State["colours"], paper: Paper): Figure {
  const { names } = layer.segments!;
  const colours = coloursOn(palette, paper.dark);
  const of = (from: number, to: number) => painted(layer, head, from, to);
  const span = spanOf(names.flatMap((_, from) => names.map((_, to) => of(from, to))));
  return {
    name: `headscope-layer-${layer.index}-head-${head}-segments`,
    title: titled(nameOf(layer.index, head), bestPattern({ layer: layer.index, head })),
    caption: [...origin(), texts.hint],
    body: tabular(names, names, [texts.corner, texts.keyIn], (from, to) => of(from, to).p, (from, to) => paintOf(of(from, to), span, colours), paper),
    bar: barFor(span, colours),
  };
}

function headsFigure(names: string[], from: number, to: number, leavesOut: boolean, palette: State["colours"], paper: Paper): Figure {
  const colours = coloursOn(palette, paper.dark);
  const layers = data.layers.filter((layer) => sameNames(layer, names));
  const of = (layer: Layer, head: number) => painted(layer, head, from, to, leavesOut);
  const span = spanOf(layers.flatMap((layer) => Array.from({ length: layer.heads }, (_, head) => of(layer, head))));
  const heads = Array.from({ length: Math.max(...layers.map((layer) => layer.heads)) }, (_, head) => String(head));
  return {
    name: "headscope-segments",
    title: texts.fromTo(names[from], names[to]) + (leavesOut ? `, ${texts.without}` : ""),
    caption: [...origin(), texts.headsHint(names[from], names[to])],
    body: tabular(layers.map((layer) => layer.short), heads, [grid.layer, grid.head], (n, head) => (head < layers[n].heads ? of(layers[n], head).p : null), (n, head) => paintOf(of(layers[n], head), span, colours), paper),
    bar: barFor(span, colours),
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
  const cells = places.map((place) => ({ place, ...painted(data.layers[place.layer], place.head, from, to, leavesOut) }));
  const at = (layer: number, head: number) => cells.find(({ place }) => place.layer === layer && place.head === head)!;
  const span = spanOf(cells);
  const evens = cells.map(({ even }) => even).filter((each) => each !== null);
  const best = cells.filter(({ p }) => p !== null).sort((a, b) => b.p! - a.p!).slice(0, LISTED);
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
      <Most {...{ cells, from, to }} name={names[to]} />
      <p class="hint">{texts.viewHint} {leavesOut ? `${texts.withoutHint} ${texts.withoutChance}` : evens.length > 0 && `${texts.viewEven(percent(evens.reduce((a, b) => a + b, 0) / evens.length))}`}</p>
      <Colouring {...{ span, colours: state.colours }} layer={FIRST_LAYER!} />
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
                    const of = at(layer.index, head);
                    const text = of.p === null ? NO_VALUE : percent(of.p);
                    return (
                      <td key={head}>
                        <button type="button" style={styleOf(paintOf(of, span, state.colours))} class={of.telling ? "" : "dim"} title={of.even === null ? undefined : texts.evenTip(percent(of.even))} aria-label={texts.cell(nameOf(layer.index, head), text)} onClick={() => open({ layer: layer.index, head })}>{text}</button>
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
            {best.map(({ place, p, telling }) => (
              <li key={`${place.layer}.${place.head}`} class={telling ? "" : "dim"}>
                <button type="button" onClick={() => open(place)}>{nameOf(place.layer, place.head)}</button>
                <span class="meter" aria-hidden="true"><i style={{ width: `${100 * p!}%` }} /></span>
                <span>{percent(p!)} <small>{aside(place, leavesOut ? null : rest(data.layers[place.layer], place.head, from, to))}</small></span>
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

/** What follows a share in the list: "(24 % without the first token) · induction 48 %". */
function aside(place: Place, without: number | null): string {
  return [without !== null && texts.withoutIn(percent(without)), !isWeak(place) && bestPattern(place)].filter(Boolean).join(" · ");
}

/** Whether a head is named after the first token, and that token belongs to a segment. */
function readsFirst(place: Place, segment: number): boolean {
  const holdsFirst = data.layers[place.layer].segments!.spans.some(([of, start]) => of === segment && start === 0);
  return holdsFirst && !isWeak(place) && data.patterns[place.layer]?.[place.head]?.[0]?.[0] === "first";
}

function sameNames(layer: Layer, names: string[]): boolean {
  return layer.segments !== null && layer.segments.names.join("\n") === names.join("\n");
}
