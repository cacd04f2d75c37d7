// Why this weight: how the weight of the selected query on the selected key comes about, from q and k in the page.

import type { ComponentChildren } from "preact";
import { useEffect, useState } from "preact/hooks";
import { data, type Head, hasTokens, type Layer, queryAt, range, token } from "./data";
import { embedded, exactTile, heldWindows, reasonOf } from "./exact";
import type { ExactHead, Reason, Rival } from "./exact_worker";
import { opened } from "./head";
import { namesOf } from "./naming";
import type { State } from "./state";
import { why } from "./tiles";
import { fill, names, reason as texts } from "./texts";
import { nameOf, oneOf, position, tokenOf, windowsOf } from "./words";

const PARTS = 10; // dimensions
const MOST_OFFERED = 8; // windows with a button each

interface Props {
  layer: Layer;
  head: Head;
  state: State;
  change: (part: Partial<State>) => void;
}

/** The selected query and key; null where the selected cell covers several. */
function selected(layer: Layer, { cell, row, column }: State, lengths: [number, number]): [number, number] | null {
  if (cell) return cell[0] < lengths[0] && cell[1] < lengths[1] ? cell : null;
  const single = layer.map?.ranges && layer.map.rows === lengths[0] && layer.map.columns === lengths[1];
  return single && row !== null && column !== null ? [row, column] : null;
}

export function Why({ layer, head, state, change }: Props) {
  if (windowsOf(layer) > 0 && data.exact.length > 0) return <OfWindows {...{ layer, head, state, change }} />;
  const about = embedded(layer, state.head);
  if (data.exact.length === 0) return layer.map ? <Absent text={data.served ? texts.served : texts.absent} /> : null;
  if (!about) return <Others {...{ state, change }} />;
  const at = selected(layer, state, about.lengths);
  return (
    <section class="why" aria-labelledby="why-title">
      <h3 id="why-title">{texts.title}</h3>
      {at ? <Steps {...{ layer, about, at }} /> : <p class="hint">{texts.choose}</p>}
      <p class="hint stored">{texts.stored(about.k.kind, about.bits, about.error)}</p>
    </section>
  );
}

/** The selected weight where the maps merge windows: that of the selected query and key, else the largest of the selected cell. */
function weightOf(layer: Layer, { map }: Head, { cell, row, column, window, head }: State): { window: number; at: [number, number] } | null {
  if (cell && embedded(layer, head, window)) return { window, at: cell };
  const places = map?.places;
  if (!places || row === null || column === null) return null;
  const n = row * map.columns + column;
  if (!(map.max[n] > 0)) return null;
  const start = layer.map!.ranges ? [range(row, map.rows, layer.lengths![0])[0], range(column, map.columns, layer.lengths![1])[0]] : [0, 0];
  return { window: places.run[n], at: [places.query[n] + start[0], places.key[n] + start[1]] };
}

function OfWindows({ layer, head, state, change }: Props) {
  const held = heldWindows(layer, state.head);
  if (held.length === 0) return <Others {...{ state, change }} />;
  const found = weightOf(layer, head, state);
  const about = found && embedded(layer, state.head, found.window);
  const go = (window: number) => {
    void strongestIn(embedded(layer, state.head, window)!, state).then((cell) => change({ window, cell, ...(cell ? {} : { alone: true }) }));
  };
  return (
    <section class="why" aria-labelledby="why-title">
      <h3 id="why-title">{texts.title}</h3>
      {found && about && !state.cell && <p class="hint">{texts.largestIn(found.window)}</p>}
      {found && about && <Explained {...{ layer, about }} at={found.at} />}
      {!about && <p class="hint">{found ? texts.elsewhere(found.window) : texts.chooseInWindows}</p>}
      {!about && <Held windows={held} go={go} />}
    </section>
  );
}

/** The largest weight of a window in the selected cell; null where the cell has none there, or none is selected. */
async function strongestIn(about: ExactHead, { row, column, layer }: State): Promise<[number, number] | null> {
  const map = data.layers[layer].map!;
  if (row === null || column === null) return null;
  const [queries, keys] = [range(row, map.rows, about.lengths[0]), range(column, map.columns, about.lengths[1])];
  if (queries[1] > about.lengths[0] || keys[1] > about.lengths[1]) return null;
  const wide = keys[1] - keys[0];
  const { max } = await exactTile(about, queries, keys, Math.max(wide, queries[1] - queries[0]), new AbortController().signal);
  let best = -1;
  for (let n = 0; n < max.length; n++) if (max[n] > 0 && !(max[n] <= max[best])) best = n;
  return best < 0 ? null : [queries[0] + Math.floor(best / wide), keys[0] + (best % wide)];
}

/** A button for each window that the page holds q and k of. */
export function Held({ windows, go }: { windows: number[]; go: (window: number) => void }) {
  return (
    <p class="held">
      {windows.slice(0, MOST_OFFERED).map((window) => <button type="button" key={window} onClick={() => go(window)}>{texts.goToWindow(window)}</button>)}
    </p>
  );
}

/** How a weight comes about, and how closely q and k are stored. */
export function Explained({ layer, about, at }: { layer: Layer; about: ExactHead; at: [number, number] }) {
  return (
    <>
      <Steps {...{ layer, about, at }} />
      <p class="hint stored">{texts.stored(about.k.kind, about.bits, about.error)}</p>
    </>
  );
}

/** Why a page has no steps: it does not hold q and k. */
function Absent({ text }: { text: string }) {
  return (
    <section class="why" aria-labelledby="why-title">
      <h3 id="why-title">{texts.title}</h3>
      <p class="hint">{text}</p>
    </section>
  );
}

/** How close the tiles of a head are to the model's weights, where q and k are stored in fewer bits than the recording has. */
export function Closeness({ layer, head, window }: { layer: Layer; head: number | undefined; window: number | null }) {
  const about = head === undefined || data.served ? null : embedded(layer, head, window);
  return about && about.error > 0 ? <p class="hint stored">{texts.stored(about.k.kind, about.bits, about.error)}</p> : null;
}

/** The heads that the page can compute, each as a button. */
export function heldHeads(go: (head: ExactHead) => void) {
  const heads = data.exact.filter(({ layer, head }, n) => data.exact.findIndex((each) => each.layer === layer && each.head === head) === n);
  return heads.map((each, n) => (
    <span key={`${each.layer}.${each.head}`}>
      {n > 0 && ", "}
      <button type="button" class="link" onClick={() => go(each)}>{nameOf(each.layer, each.head)}</button>
    </span>
  ));
}

/** The heads that the page can compute, where this is not one. */
function Others({ state, change }: Pick<Props, "state" | "change">) {
  const heads = heldHeads((each) => change(opened(state, each.layer, each.head)));
  return (
    <section class="why" aria-labelledby="why-title">
      <h3 id="why-title">{texts.title}</h3>
      <p class="hint">{fill(texts.others, { heads })}</p>
    </section>
  );
}

function Steps({ layer, about, at: [query, key] }: { layer: Layer; about: ExactHead; at: [number, number] }) {
  const [found, setFound] = useState<{ about: ExactHead; query: number; key: number; is: Reason } | null>(null);
  const [failed, setFailed] = useState("");
  useEffect(() => {
    let stale = false;
    setFailed("");
    reasonOf(about, query, key).then(
      (is) => !stale && setFound({ about, query, key, is }),
      (error: unknown) => !stale && setFailed(why(error)),
    );
    return () => void (stale = true);
  }, [about, query, key]);
  if (failed) return <p class="hint" role="status">{texts.failed(failed)}</p>;
  if (!found || found.about !== about || found.query !== query || found.key !== key) return null;
  const { is } = found;
  const { scale, softcap, window = null } = about;
  const scaled = is.dot * scale;
  const capped = softcap === null ? scaled : softcap * Math.tanh(scaled / softcap);
  const name = (axis: "query" | "key", place: number) => <bdi>{names.one(axis, position(layer, axis, place, window))}</bdi>;
  const input = oneOf(layer, window);
  const ends = endsOf(layer, about.head, query, key, window);
  return (
    <div aria-live="polite" data-p={is.p} data-logit={is.logit} data-dot={is.dot}>
      <p>{fill(texts.pair, { query: name("query", query), key: name("key", key) })}{input && texts.of(input)}</p>
      <ol>
        <Step title={texts.product} formula={texts.dot(is.dot)}><Parts products={is.products} title={(d, value) => texts.partTitle(d, is.q[d], is.k[d], value)} /></Step>
        <Step title={texts.scaled} formula={texts.scale(is.dot, scale, scaled)} />
        {softcap !== null && <Step title={texts.capped} formula={texts.cap(softcap, scaled, capped)} />}
        {is.bias !== null && Number.isFinite(is.bias) && <Step title={texts.biased} formula={texts.bias(capped, is.bias, is.logit)} />}
        <li class={is.masked ? "masked" : ""}>{texts.maskedTitle}: {is.masked ? texts.masked : about.spans || about.rest ? texts.visible : texts.noMask}</li>
        {!is.masked && (is.lse !== is.lse ? <li>{texts.noWeights}</li> : (
          <>
            <Step title={texts.lseTitle} formula={texts.lse(is.lse)} />
            <Step title={texts.weightTitle} formula={texts.weight(is.logit, is.lse, is.p)} />
            {is.rival && <Against {...{ is, rival: is.rival, other: name("key", is.rival.key), selected: name("key", key) }} />}
            {ends.length > 0 && <li class="ending">{ends.map((end) => texts.ends[end]).join(" ")}</li>}
          </>
        ))}
      </ol>
    </div>
  );
}

type End = keyof typeof texts.ends;

/** All that a key is to a query of the same text, the patterns that name the head first; none where the page does not know. */
function endsOf(layer: Layer, head: number, query: number, key: number, window: number | null): End[] {
  if (data.image || layer.kind !== "self" || layer.other) return [];
  const at = window === null ? queryAt(layer, query) : query;
  const text = (place: number) => (window !== null ? tokenOf(layer, window, place) : hasTokens(layer) ? token(place, true) : null);
  const holds: Record<End, boolean> = {
    self: key === at,
    previous: key === at - 1,
    induction: key > 0 && key <= at && text(at) !== null && text(key - 1) === text(at),
    first: key === 0,
  };
  const named = namesOf({ layer: layer.index, head }).map(([name]) => name);
  const rank = (end: End) => (named.includes(end) ? named.indexOf(end) : named.length);
  return (Object.keys(holds) as End[]).filter((end) => holds[end]).sort((a, b) => rank(a) - rank(b));
}

function Step({ title, formula, children }: { title: string; formula: string; children?: ComponentChildren }) {
  return <li><span class="hint">{title}</span><br /><b>{formula}</b>{children}</li>;
}

/** What decides between the selected key and the other one with the largest weight: a dimension that is large for both does not. */
function Against({ is, rival, other, selected }: { is: Reason; rival: Rival; other: ComponentChildren; selected: ComponentChildren }) {
  const sum = rival.products.reduce((all, value) => all + value, 0);
  return (
    <li class="rival" data-key={rival.key}>
      <span class="hint">{fill(texts.rival(rival.p), { other })}</span><br />
      <b>{fill(texts.decides(sum), { selected, other })}</b>
      <Parts products={rival.products} title={(d, value) => texts.rivalTitle(d, is.q[d], is.k[d], rival.k[d], value)} />
    </li>
  );
}

/** The dimensions that add or take most, as bars to the right and to the left. */
function Parts({ products, title }: { products: Float64Array; title: (d: number, value: number) => string }) {
  const order = Array.from(products.keys()).sort((a, b) => Math.abs(products[b]) - Math.abs(products[a]));
  const shown = order.slice(0, PARTS);
  const rest = order.slice(PARTS).reduce((sum, d) => sum + products[d], 0);
  const most = Math.abs(products[shown[0]]) || 1;
  return (
    <>
      <p class="hint">{texts.parts(shown.length, order.length)}</p>
      <ul class="dimensions">
        {shown.map((d) => {
          const value = products[d];
          const wide = (50 * Math.abs(value)) / most;
          return (
            <li key={d} title={title(d, value)}>
              <span>{texts.dimension(d)}</span>
              <span class="sum" aria-hidden="true"><i class={value < 0 ? "less" : "more"} style={{ width: `${wide}%`, left: `${value < 0 ? 50 - wide : 50}%` }} /></span>
              <span>{texts.part(value)}</span>
            </li>
          );
        })}
      </ul>
      {order.length > PARTS && <p class="hint">{texts.rest(order.length - PARTS, rest)}</p>}
    </>
  );
}
