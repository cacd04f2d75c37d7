// Two recordings: which heads moved, and one head in both.

import { useEffect, useLayoutEffect, useMemo, useRef, useState } from "preact/hooks";
import { type Change, type Compared, type HeadChange, LIMITS, sameBins } from "./comparing";
import { ENTROPIES, inOrder, reading } from "./reading_order";
import { data, type Head, type Layer } from "./data";
import { difference, type Field, field, onOneScale, Pictures } from "./field";
import { Legend } from "./head";
import { Cell, MapView, save, type Zoom } from "./map";
import { say } from "./languages";
import { type Other, useOther } from "./other";
import { ownSide, type Side } from "./side";
import type { State } from "./state";
import { csvLines, Meanings } from "./table";
import { changes as texts, figure, fill, fixed, NO_VALUE, percent, search, segments } from "./texts";
import { mapValue, nameOf } from "./words";

interface Props {
  state: State;
  theme: string;
  change: (part: Partial<State>) => void;
}

const LINES = 60; // heads that are listed at once
const NAMED = 3; // statistics in a line of the list
const THUMB = 84; // pixels
const FAINT = 0.1; // the scale of a difference ends at no less than this share of that of the maps

function headingOf(name: string): string {
  const [first, query, key, without] = name.split("/");
  if (first === "segments" && key !== undefined) return texts.segment(query, key) + (without ? ` ${segments.without}` : "");
  return data.names.find((each) => each.name === name)?.heading ?? say(name.replaceAll("_", " "));
}

function told({ name, before, after }: Change): string {
  const change = texts.change(headingOf(name), figure(before), figure(after));
  if (!ENTROPIES.includes(name) || before === null || after === null || before === after) return change;
  return after < before ? texts.sharper(change) : texts.broader(change);
}

/** What moved of a head, in words, in the order of reading; of one that did not move, its largest change. */
function largest(head: HeadChange, most: number): string[] {
  const entropy = head.changes.find((each) => ENTROPIES.includes(each.name))?.name; // the first is the one that changed more
  const parts: [number, number, string][] = head.changes
    .filter((each) => (head.moved ? each.moved : each.size > 0) && (!ENTROPIES.includes(each.name) || each.name === entropy))
    .map((each) => [reading(each.name), each.size, told(each)]);
  const far = (name: "map" | "received", text: (share: string) => string) => {
    const [value, limit] = [head[name], LIMITS[name]];
    if (value !== null && (head.moved ? value >= limit : value > 0)) parts.push([reading(name), value / limit, text(percent(value))]);
  };
  far("map", texts.mapChange);
  far("received", texts.receivedChange);
  if (head.broken[0] > 0 !== head.broken[1] > 0) parts.push([reading("broken"), Infinity, texts.brokenChange(...head.broken)]);
  return parts.sort((x, y) => (head.moved ? x[0] - y[0] : 0) || y[1] - x[1]).slice(0, most).map(([, , text]) => text);
}

const OF_VALUES = "value_norm";

/** Whether a head moved by the length of its values alone: its attention did not. */
function onlyValues(head: HeadChange): boolean {
  const moved = head.changes.filter((each) => each.moved);
  const elsewhere = (["map", "received"] as const).some((name) => (head[name] ?? 0) >= LIMITS[name]);
  return moved.length > 0 && moved.every(({ name }) => name === OF_VALUES) && !elsewhere && head.broken[0] > 0 === head.broken[1] > 0;
}

function shortName({ layer, head }: HeadChange): string {
  const { short } = data.layers[layer];
  return /^\d+$/.test(short) ? `${short}.${head}` : nameOf(layer, head);
}

// ---------------------------------------------------------------- the list

let clicked = false; // a head of the list, which opens

export function ChangesView({ state, theme, change }: Props) {
  const { other } = useOther();
  const [lines, setLines] = useState(LINES);
  const list = useRef<HTMLDivElement>(null);
  if (!other) return null;
  const { is } = other;
  const found = listed(is, state);
  const open = ({ layer, head }: HeadChange) => {
    clicked = true;
    change({ view: "change", layer, head, row: null, column: null, zoom: [1, 0.5, 0.5] });
  };
  const key = (event: KeyboardEvent) => {
    const step = { ArrowDown: 1, ArrowRight: 1, ArrowUp: -1, ArrowLeft: -1 }[event.key];
    const buttons = [...list.current!.querySelectorAll<HTMLElement>("button.changed")];
    const at = buttons.indexOf(document.activeElement as HTMLElement);
    if (!step || at < 0) return;
    event.preventDefault();
    buttons[Math.max(0, Math.min(buttons.length - 1, at + step))].focus();
  };
  return (
    <section aria-labelledby="changes-title">
      <h2 id="changes-title" class="unseen">{texts.title}</h2>
      <p class="changes-summary"><Summary is={is} /></p>
      <p class="hint"><Sides other={other} /> {texts.hint} {is.maps && texts.scales} {is.maps && texts.mapScale(state.scale)}</p>
      <p class="hint">{texts.limits(LIMITS)}</p>
      {!is.maps && !data.layers.some((layer) => layer.map) && <p class="hint">{texts.noMaps}</p>}
      {is.notes.length > 0 && <p class="hint changes-notes">{is.notes.map((note) => note()).join(" ")}</p>}
      {is.only.map((each) => <OnlyIn key={each.side} {...each} />)}
      <p class="switches changes-switches">
        {is.moved > 0 && is.moved < is.heads.length && (
          <label><input type="checkbox" checked={state.onlyMoved} onChange={(event) => change({ onlyMoved: event.currentTarget.checked })} /> {texts.only}</label>
        )}
        <span>{texts.shown(Math.min(lines, found.length), is.heads.length)}</span>
        <button type="button" onClick={() => save("headscope-changes.csv", new Blob([csv(is, other.side)], { type: "text/csv" }))}>{texts.csv}</button>
      </p>
      <div class="changes" ref={list} onKeyDown={key}>
        {found.slice(0, lines).map((head) => <Line key={`${head.layer}.${head.head}`} {...{ head, other, state, theme, open }} />)}
      </div>
      {found.length > lines && <p><button type="button" onClick={() => setLines(lines + LINES)}>{texts.showMore(Math.min(LINES, found.length - lines))}</button></p>}
    </section>
  );
}

const NAMED_ONLY = 6;

/** What one side alone has: a few names, and the others when the reader unfolds them. */
function OnlyIn({ side, names }: Compared["only"][number]) {
  const [all, setAll] = useState(false);
  const more = all ? 0 : Math.max(0, names.length - NAMED_ONLY);
  return (
    <p class="hint changes-only">
      {texts.onlyIn(side, names.slice(0, names.length - more).map((name) => name()))}
      {more > 0 && <>{" "}<button type="button" onClick={() => setAll(true)}>{search.more(more)}</button></>}
    </p>
  );
}

/** What A and B are, where they have names. */
function Sides({ other: { labels: [a, b] } }: { other: Other }) {
  return a === texts.a && b === texts.b ? null : <>{fill(texts.sides, { a: <b>{say(a, true)}</b>, b: <b>{say(b, true)}</b> })}</>;
}

function listed(is: Compared, state: State): HeadChange[] {
  const heads = inOrder(is);
  return state.onlyMoved && is.moved > 0 ? heads.filter((each) => each.moved) : heads;
}

function Summary({ is }: { is: Compared }) {
  const [first] = inOrder(is);
  if (is.moved === 0) {
    const [what] = largest(first, 1);
    return <>{texts.none(is.heads.length)} {what && fill(texts.largest, { head: <b>{shortName(first)}</b>, change: what, size: percent(first.size) })}</>;
  }
  const layers = [...new Set(is.heads.filter((each) => each.moved).map((each) => each.layer))].sort((a, b) => a - b);
  return <><b>{texts.summary(is.moved, is.heads.length, layers.map((layer) => data.layers[layer].short))}</b> {fill(texts.most, { head: <b>{shortName(first)}</b>, change: largest(first, 1)[0] })}</>;
}

/** A head of the list: its maps in A and B, what B has more and less, and what moved most. */
function Line({ head, other, state, theme, open }: { head: HeadChange; other: Other; state: State; theme: string; open: (head: HeadChange) => void }) {
  const element = useRef<HTMLButtonElement>(null);
  const [near, setNear] = useState(false);
  useEffect(() => {
    const watcher = new IntersectionObserver((seen) => seen.some((each) => each.isIntersecting) && setNear(true), { rootMargin: "300px" });
    watcher.observe(element.current!);
    return () => watcher.disconnect();
  }, []);
  const both = useBoth(other.side, head, near);
  const fields = useMemo(() => (both ? fieldsOf(both, state, head, other.side) : null), [both, state.pool, state.sink]);
  const what = largest(head, NAMED);
  const alike = sameBins(data.layers[head.layer], other.side.layers[head.other]);
  return (
    <button type="button" ref={element} class={`changed${head.moved ? " moved" : ""}`} aria-label={texts.label(nameOf(head.layer, head.head), head.moved, what.join(", "))} onClick={() => open(head)}>
      <b>{shortName(head)}</b>
      {data.layers[head.layer].map && ([[texts.a, fields?.a], [texts.b, fields?.b], ...(alike ? [[texts.difference, fields?.difference] as const] : [])] as const).map(([name, of]) => (
        <span class="thumbnail" key={name}>
          <Thumbnail {...{ of: of ?? null, state, theme }} />
          <small>{name}</small>
        </span>
      ))}
      <span class={`what${data.layers[head.layer].map ? alike ? "" : " wide" : " alone"}`}>{head.moved ? [...what, ...(onlyValues(head) ? [texts.valuesOnly] : [])].map((text, n) => <span key={n}>{text}</span>) : <span class="weak">{texts.still}{what[0] && ` (${what[0]})`}</span>}</span>
    </button>
  );
}

function Thumbnail({ of, state, theme }: { of: Field | null; state: State; theme: string }) {
  const canvas = useRef<HTMLCanvasElement>(null);
  useLayoutEffect(() => {
    const element = canvas.current!;
    const side = Math.round(THUMB * Math.min(2, devicePixelRatio || 1));
    element.width = element.height = side;
    delete element.dataset.drawn;
    if (!of) return;
    const context = element.getContext("2d")!;
    context.imageSmoothingEnabled = false;
    context.drawImage(new Pictures(of, state.scale, state.colours).fit(side), 0, 0, side, side);
    element.dataset.drawn = "yes";
  }, [of, state.scale, state.colours, theme]);
  return <canvas ref={canvas} class={of?.signed ? "signed" : ""} aria-hidden="true" />;
}

interface Both {
  a: Head;
  b: Head;
}

/** A head of both recordings once it is decoded; null before, or where it is not needed. */
function useBoth(side: Side, { layer, other, head }: { layer: number; other: number; head: number }, needed: boolean): Both | null {
  const [found, setFound] = useState<{ key: string; is: Both } | null>(null);
  const key = `${layer}.${head}`;
  useEffect(() => {
    if (!needed) return;
    let stale = false;
    void Promise.all([ownSide().head(layer, head), side.head(other, head)]).then(([a, b]) => !stale && setFound({ key, is: { a, b } }), () => undefined);
    return () => void (stale = true);
  }, [side, key, needed]);
  return found?.key === key ? found.is : null;
}

/** The maps of both and their difference: A and B share a scale, and a small difference stays faint. */
function fieldsOf({ a, b }: Both, state: State, head: HeadChange, side: Side): { a: Field | null; b: Field | null; difference: Field | null } {
  const [one, other] = [data.layers[head.layer], side.layers[head.other]];
  const [x, y] = [[a, one], [b, other]].map(([of, layer]) => ((of as Head).map ? field((of as Head).map!, state.pool, state.sink, (layer as Layer).map!.exact) : null));
  const [before, after] = onOneScale(x, y);
  const less = x && y && sameBins(one, other) ? difference(y, x) : null;
  return { a: before, b: after, difference: less && { ...less, top: Math.max(less.top, FAINT * before!.top) } };
}

/** Every change in full, one line each. */
function csv(is: Compared, side: Side): string {
  const lines: unknown[][] = [["layer", "head", "quantity", "before", "after", "thresholds", "moved"]];
  for (const head of is.heads) {
    const place = [data.layers[head.layer].name, head.head];
    for (const { name, before, after, size, moved } of head.changes) lines.push([...place, name, before, after, size === size ? size : null, moved]);
    for (const [name, value, limit] of [["map", head.map, LIMITS.map], ["received", head.received, LIMITS.received]] as const) {
      if (value !== null) lines.push([...place, name, null, value, value / limit, value >= limit]);
    }
    const broken = [data.layers[head.layer].broken[head.head], side.layers[head.other].broken[head.head]];
    lines.push([...place, "broken", ...broken, null, broken[0] > 0 !== broken[1] > 0]);
  }
  return csvLines(lines);
}

// ---------------------------------------------------------------- one head in both

export function ChangeView({ state, theme, change }: Props) {
  const { other } = useOther();
  const found = other ? inOrder(other.is) : [];
  const head = found.find((each) => each.layer === state.layer && each.head === state.head) ?? found[0];
  const list = other ? listed(other.is, state) : [];
  const at = list.indexOf(head);
  const step = (by: number) => {
    const to = list[at + by];
    return to ? () => change({ layer: to.layer, head: to.head, row: null, column: null }) : null;
  };
  const title = useRef<HTMLHeadingElement>(null);
  useLayoutEffect(() => {
    if (clicked) title.current?.focus({ preventScroll: true }); // what was clicked is gone, and the focus with it
    clicked = false;
  }, []);
  useEffect(() => {
    const pressed = (event: KeyboardEvent) => {
      const target = event.target as HTMLElement;
      if (event.shiftKey || event.ctrlKey || event.altKey || event.metaKey || /^(INPUT|SELECT|TEXTAREA)$/.test(target.tagName) || target.closest?.("[role=tablist], .panel, .scroll")) return;
      if (event.key === "Escape") return change({ view: "changes" });
      const move = event.key === "ArrowLeft" ? step(-1) : event.key === "ArrowRight" ? step(1) : null;
      if (!move) return;
      event.preventDefault();
      move();
    };
    addEventListener("keydown", pressed);
    return () => removeEventListener("keydown", pressed);
  });
  if (!other) return null;
  const name = nameOf(head.layer, head.head);
  const button = (mark: string, label: string, act: (() => void) | null) =>
    <button type="button" aria-label={label} title={label} aria-disabled={!act} onClick={() => act?.()}>{mark}</button>;
  return (
    <section aria-labelledby="change-title">
      <div class="change-head">
        <button type="button" onClick={() => change({ view: "changes" })}>{texts.back}</button>
        <nav aria-label={texts.nearby}>
          {button("←", texts.previous, step(-1))} <span>{at >= 0 && texts.at(at + 1, list.length)}</span> {button("→", texts.next, step(1))}
        </nav>
        <h2 id="change-title" tabIndex={-1} ref={title}>{name}</h2>
        <span class={head.moved ? "moved" : "weak"}>{head.moved ? texts.moved : texts.still}{onlyValues(head) && `: ${texts.valuesOnly}`}</span>
      </div>
      <Maps {...{ head, other, state, theme, change, name }} />
      <Figures head={head} />
      <Meanings names={data.names} />
    </section>
  );
}

function Maps({ head, other, state, theme, change, name }: Props & { head: HeadChange; other: Other; name: string }) {
  const both = useBoth(other.side, head, true);
  const fields = useMemo(() => (both ? fieldsOf(both, state, head, other.side) : null), [both, state.pool, state.sink]);
  const [one, second] = [data.layers[head.layer], other.side.layers[head.other]];
  // the axes are equally long on all three maps, so that they have one size
  const layers = useMemo(() => [one, second].map((layer) => ({ ...layer, entropy: 0, received: 0 })), [one, second]);
  const zoom: Zoom = useMemo(() => ({ at: state.zoom, change: (at) => change({ zoom: at }) }), [state.zoom, change]);
  const pin = (row: number | null, column: number | null) => change({ row, column });
  const alike = sameBins(one, second);
  const { row, column } = state;
  const cell = fields && row !== null && column !== null;
  const side = (which: 0 | 1, of: Field | null, decoded: Head | undefined, label: string) => of && decoded && (
    <div>
      <h3>{texts.sideOf(label, say(other.labels[which], true))}</h3>
      <MapView
        layer={layers[which]} head={decoded} field={of} scale={state.scale} colours={state.colours} theme={theme} most={420} zoom={zoom}
        {...(which === 0 || alike ? { row, column, pin } : { row: null, column: null, pin: () => undefined })}
        title={texts.sideOf(label, name)} exports={`headscope-${head.layer}.${head.head}-${label}`}
      />
      <Legend layer={layers[which]} field={of} state={state} />
      {cell && (which === 0 || alike) && row < of.rows && column < of.columns && <p aria-live="polite"><Cell layer={layers[which]} head={decoded} field={{ ...of }} row={row} column={column} /></p>}
    </div>
  );
  const less = fields?.difference;
  return (
    <div class="pair three">
      {side(0, fields?.a ?? null, both?.a, texts.a)}
      {side(1, fields?.b ?? null, both?.b, texts.b)}
      {less && both && (
        <div>
          <h3>{texts.difference}</h3>
          <MapView layer={layers[1]} head={both.b} field={less} scale={state.scale} colours={state.colours} {...{ theme, zoom, row, column, pin }} most={420} title={texts.differenceOf(name)} exports={`headscope-${head.layer}.${head.head}-difference`} />
          <Legend layer={layers[1]} field={less} state={state} />
          {cell && row < less.rows && column < less.columns && <p aria-live="polite">{texts.difference}: <b>{signed(less.values[row * less.columns + column], layers[1])}</b></p>}
        </div>
      )}
      {fields?.a && fields.b && !less && <p class="hint">{texts.noDifference}</p>}
    </div>
  );
}

function signed(value: number, layer: Layer): string {
  return texts.signed(mapValue(value, layer));
}

function Figures({ head }: { head: HeadChange }) {
  const distance = (name: "map" | "received") =>
    head[name] !== null && { at: reading(name), name: texts[name], before: "", after: "", change: percent(head[name]), size: head[name] / LIMITS[name], moved: head[name] >= LIMITS[name] };
  const lines = [
    ...head.changes.map(({ name, before, after, size, moved }) => ({
      at: reading(name), name: headingOf(name), before: figure(before), after: figure(after), size, moved,
      change: before === null || after === null ? NO_VALUE : texts.signed(figure(after - before)),
    })),
    distance("map"),
    distance("received"),
    head.broken.some(Boolean) && { at: reading("broken"), name: texts.broken, before: String(head.broken[0]), after: String(head.broken[1]), change: "", size: NaN, moved: head.broken[0] > 0 !== head.broken[1] > 0 },
  ].filter((each) => each !== false);
  lines.sort((x, y) => Number(y.moved) - Number(x.moved) || x.at - y.at);
  return (
    <div class="scroll" tabIndex={0} role="region" aria-label={texts.statistics}>
      <table class="change-table">
        <thead><tr><th scope="col">{texts.columns.name}</th><th scope="col">{texts.columns.before}</th><th scope="col">{texts.columns.after}</th><th scope="col">{texts.columns.change}</th><th scope="col" title={texts.sizeHelp}>{texts.columns.size}</th><td /></tr></thead>
        <tbody>
          {lines.map(({ name, before, after, change, size, moved }) => (
            <tr key={name} class={moved ? "moved" : ""}>
              <th scope="row">{name}</th><td>{before}</td><td>{after}</td><td>{change}</td><td>{size === Infinity ? "∞" : size === size ? fixed(size, 2) : NO_VALUE}</td>
              <td class="text">{moved ? texts.moved : size >= 1 ? texts.notMoved : ""}</td>
            </tr>
          ))}
        </tbody>
      </table>
    </div>
  );
}
