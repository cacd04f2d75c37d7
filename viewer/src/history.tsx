// The history of a training: what happened, heads × steps, the bands of all heads, one step, one head.

import { useEffect, useLayoutEffect, useMemo, useRef, useState } from "preact/hooks";
import { data } from "./data";
import { Curves, Band, useCurves } from "./history_chart";
import { type Alarm, ALARMED, alarms, allValues, COUNT, ENTROPY, firstAlarms, HEADS, history, type Quantity, quantityOf, ranked, RANKS, type Rise, riseOf, type What } from "./history_data";
import { across, EDGE, ends, FLAG, headName, round, shown } from "./history_draw";
import { StepGrid } from "./history_grid";
import { HeadsMap } from "./history_map";
import { Bar } from "./legend";
import { useMore, useWidth } from "./screen";
import { Select } from "./select";
import type { State } from "./state";
import { history as texts, whole, tabs } from "./texts";

interface Props {
  state: State;
  theme: string;
  change: (part: Partial<State>) => void;
}

const GUTTER = 46; // pixels at the left of the map and the charts
const THUMB = 2 * EDGE; // pixels of the slider's thumb

export function History({ state, theme, change }: Props) {
  const of = quantityOf(state.quantity);
  const found = useValues(state.quantity);
  const curves = useCurves(state);
  useSteps(state.moment, change);
  const rows = useMemo(() => ranked(state.rank, found?.of ?? of, found?.values ?? null), [state.rank, found]);
  const step = history.steps[state.moment];
  const side = useRef<HTMLElement>(null);
  useMore(side);
  const name = headName(state.layer, state.head);
  return (
    <>
      <Happened {...{ state, change }} />
      <div class="history">
        <section aria-labelledby="history-title">
          <h2 id="history-title" class="unseen">{texts.title}</h2>
          <div class="switches">
            <Select label={texts.quantity} value={of.name} options={history.quantities.map(({ name, heading }) => [name, heading])} choose={(quantity) => change({ quantity })} />
            <Select label={texts.rows} value={state.rank} options={RANKS.filter((rank) => rank !== "alarm" || alarms.length > 0).map((rank) => [rank, texts.ranks[rank]])} choose={(rank) => change({ rank })} />
            <Legend {...{ of, state }} />
          </div>
          {found && <HeadsMap {...{ state, theme, rows, change }} of={found.of} values={found.values} gutter={GUTTER} />}
          <Slider {...{ state, change }} />
          {history.bands.map(({ name, block }) => (
            <Band key={name} {...{ name, state, change }} place={block} gutter={GUTTER} selected={curves?.curves[history.quantities.findIndex((each) => each.name === name)] ?? null} />
          ))}
          <p class="hint">{texts.hint} {history.starts.length > 1 && texts.startsHint} {history.bands.length > 0 && texts.bandHint} {texts.stored(of)}</p>
        </section>
        <section class="history-side" ref={side} aria-label={texts.side(step, name)}>
          <h2>{texts.gridTitle(step)}</h2>
          {found && <StepGrid {...{ state, theme, change }} of={found.of} values={found.values} />}
          <h2>{texts.curves(name)}</h2>
          <Curves {...{ state, change }} found={curves} />
        </section>
      </div>
    </>
  );
}

/** The values of a quantity; those of the last one until they are decoded. */
function useValues(name: string): { of: Quantity; values: Float32Array } | null {
  const [found, setFound] = useState<{ of: Quantity; values: Float32Array } | null>(null);
  useEffect(() => {
    let stale = false;
    void allValues(name).then((values) => !stale && setFound({ of: quantityOf(name), values }));
    return () => void (stale = true);
  }, [name]);
  return found;
}

/** Arrow keys, Home and End move through the steps. */
function useSteps(moment: number, change: Props["change"]): void {
  useLayoutEffect(() => {
    const pressed = (event: KeyboardEvent) => {
      const target = event.target as HTMLElement;
      if (event.defaultPrevented || event.ctrlKey || event.altKey || event.metaKey) return;
      if (/^(INPUT|SELECT|TEXTAREA)$/.test(target.tagName) || target.closest?.("[role=tablist], .panel")) return;
      const by = event.shiftKey ? 10 : 1;
      const to = { ArrowLeft: moment - by, ArrowRight: moment + by, Home: 0, End: COUNT - 1 }[event.key];
      if (to === undefined) return;
      event.preventDefault();
      change({ moment: Math.max(0, Math.min(COUNT - 1, to)) });
    };
    addEventListener("keydown", pressed);
    return () => removeEventListener("keydown", pressed);
  }, [moment, change]);
}

/** From which step on the entropy of most heads rises; null where it does not, and until the values are decoded. */
function useRise(): Rise | null {
  const [rise, setRise] = useState<Rise | null>(null);
  useEffect(() => {
    if (!history.quantities.some(({ name }) => name === ENTROPY)) return;
    let stale = false;
    void allValues(ENTROPY).then((values) => !stale && setRise(riseOf(values)));
    return () => void (stale = true);
  }, []);
  return rise;
}

/** A rise that no single head stands for: most of the heads spread their weight more evenly. */
function RiseCard({ rise, state, change }: Pick<Props, "state" | "change"> & { rise: Rise }) {
  const { moment, place: { layer, head }, heads } = rise;
  const now = state.moment === moment && state.layer === layer && state.head === head && state.quantity === ENTROPY;
  return (
    <button type="button" class="card" title={texts.open} aria-pressed={now} onClick={() => change({ layer, head, moment, quantity: ENTROPY })}>
      <span><i class="mark rise" aria-hidden="true">↗</i> <b>{texts.rises(whole(history.steps[moment]), whole(heads), whole(HEADS))}</b></span>
      <small>{texts.riseOf(headName(layer, head), shown(rise.before), shown(rise.after))}</small>
    </button>
  );
}

/** What to look at first, in the order of the steps: for each kind of alarm the head and the step of its first one; and a rise of most heads. */
function Happened({ state, change }: Pick<Props, "state" | "change">) {
  const rise = useRise();
  const kinds = useMemo(() => {
    const of = new Map<What, Alarm[]>();
    for (const each of firstAlarms) of.set(each.what, [...(of.get(each.what) ?? []), each]);
    return [...of.values()];
  }, []);
  if (kinds.length === 0) return <Quiet {...{ state, change, rise }} />;
  const cards = [...kinds.map((raised) => ({ step: raised[0].step, raised })), ...(rise ? [{ step: history.steps[rise.moment], raised: null }] : [])];
  return (
    <div class="cards happened">
      <ul>
        {cards.sort((a, b) => a.step - b.step).map(({ raised }) => {
          if (!raised) return <li key="rise"><RiseCard {...{ state, change }} rise={rise!} /></li>;
          const [first] = raised;
          const more = raised.length - 1;
          const { layer, head, moment } = first;
          const quantity = history.quantities.find(({ name }) => name === ALARMED[first.what])?.name ?? state.quantity;
          const now = state.layer === layer && state.head === head && state.moment === moment && state.quantity === quantity;
          return (
            <li key={first.what}>
              <button type="button" class={`card${more > 0 ? " of-several" : ""}`} title={texts.open} aria-pressed={now} onClick={() => change({ layer, head, moment, quantity })}>
                <span><i class={`mark ${FLAG[first.what]}`} aria-hidden="true">{texts.marks[first.what]}</i> <b>{texts.does[first.what](headName(layer, head), whole(first.step))}</b></span>
                <small>{texts.change[first.what](before(first), shown(first.value), round(first.limit))}</small>
              </button>
              {more > 0 && <button type="button" class="more-heads" title={tabs.alarms(alarms.length)} onClick={() => change({ view: "alarms" })}>{texts.more(more, whole(raised[more].step), raised.filter(({ step }) => step === first.step).length - 1)}</button>}
            </li>
          );
        })}
      </ul>
    </div>
  );
}

/** The earlier value that an alarm is compared with, and its step. */
function before({ reference, since }: Alarm): string {
  return since === null ? shown(reference) : texts.valueAt(shown(reference), since);
}

/** Without an alarm: the head that changed most. */
function Quiet({ state, change, rise }: Pick<Props, "state" | "change"> & { rise: Rise | null }) {
  const [layer, head] = data.opensOn ?? [0, 0];
  const quantity = history.quantities[0];
  const now = state.layer === layer && state.head === head && state.quantity === quantity.name;
  return (
    <div class="cards happened">
      <ul>
        <li>
          <button type="button" class="card" title={texts.openHead} aria-pressed={now} onClick={() => change({ layer, head, quantity: quantity.name })}>
            <b>{history.alarmed ? texts.quiet(COUNT) : texts.unwatched}</b>
            <small>{texts.changed(headName(layer, head), quantity.heading)}</small>
          </button>
        </li>
        {rise && <li><RiseCard {...{ rise, state, change }} /></li>}
      </ul>
    </div>
  );
}

function Legend({ of, state }: { of: Quantity; state: State }) {
  const [low, high] = ends(of).map(shown);
  const kinds = [...new Set(firstAlarms.map((each) => each.what))];
  return (
    <>
      <span class="legend"><Bar what="" colours={state.colours} {...{ low, high }} /> {of.scale === "asinh" && texts.logScale}</span>
      {kinds.length > 0 && <span class="kinds">{kinds.map((what) => <span class="kind" key={what}><i class={`mark ${FLAG[what]}`} aria-hidden="true">{texts.marks[what]}</i> {texts.flags[what]}</span>)}</span>}
    </>
  );
}

/** The step, in line with the columns of the map, and the ways to the next alarm. */
function Slider({ state, change }: Pick<Props, "state" | "change">) {
  const box = useRef<HTMLDivElement>(null);
  const width = Math.max(0, useWidth(box) - GUTTER - EDGE);
  const half = width / COUNT / 2;
  const moments = useMemo(() => [...new Set(alarms.map((each) => each.moment))].sort((a, b) => a - b), []);
  const before = moments.filter((at) => at < state.moment).pop();
  const after = moments.find((at) => at > state.moment);
  const go = (moment: number | undefined) => {
    if (moment === undefined) return;
    const raised = alarms.filter((each) => each.moment === moment);
    const same = raised.find((each) => each.layer === state.layer && each.head === state.head) ?? raised[0];
    change({ moment, layer: same.layer, head: same.head });
  };
  return (
    <div ref={box}>
      <div class="history-axis" aria-hidden="true">
        {texts.axis}
        {width > 0 && labelled(width).map((moment) => <span key={moment} style={{ left: `${GUTTER + across(moment, width)}px` }}>{whole(history.steps[moment])}</span>)}
      </div>
      <input type="range" class="history-slider" aria-label={texts.slider} aria-valuetext={texts.step(history.steps[state.moment])} min={0} max={COUNT - 1} value={state.moment}
        style={{ marginLeft: `${GUTTER + half - THUMB / 2}px`, width: `${Math.max(THUMB, width - 2 * half + THUMB)}px` }} onInput={(event) => change({ moment: Number(event.currentTarget.value) })} />
      <div class="history-steps">
        {moments.length > 0 && <button type="button" aria-disabled={before === undefined} onClick={() => go(before)}>← {texts.before}</button>}
        <output>{texts.step(history.steps[state.moment])}</output>
        {moments.length > 0 && <button type="button" aria-disabled={after === undefined} onClick={() => go(after)}>{texts.after} →</button>}
      </div>
    </div>
  );
}

/** The steps that the axis names: evenly spaced, as many as have room. */
function labelled(width: number): number[] {
  const most = Math.max(1, Math.floor(width / (20 + 9 * whole(history.steps[COUNT - 1]).length)));
  const every = Math.max(1, Math.ceil(COUNT / most));
  return Array.from({ length: Math.ceil(COUNT / every) }, (_, n) => n * every);
}

// ---------------------------------------------------------------- all alarms

const MOST_LINES = 500;

export function AlarmTable({ change }: { change: Props["change"] }) {
  const { columns } = texts.table;
  const open = ({ layer, head, moment, what }: Alarm) => change({ view: "history", layer, head, moment, ...(history.quantities.some(({ name }) => name === ALARMED[what]) ? { quantity: ALARMED[what] } : {}) });
  return (
    <section aria-labelledby="alarms-title">
      <h2 id="alarms-title">{texts.table.title(alarms.length)}</h2>
      <p class="hint">{alarms.length > 0 ? texts.table.hint : history.alarmed ? texts.quiet(COUNT) : texts.unwatched}</p>
      {alarms.length > 0 && (
        <div class="scroll" tabIndex={0} role="group" aria-labelledby="alarms-title">
          <table class="every">
            <thead><tr>{Object.entries(columns).map(([name, text]) => <th scope="col" key={name} class={name === "what" ? "text" : undefined}>{text}</th>)}</tr></thead>
            <tbody>
              {alarms.slice(0, MOST_LINES).map((each, n) => (
                <tr key={n}>
                  <td>{whole(each.step)}</td>
                  <th scope="row"><button type="button" onClick={() => open(each)}>{headName(each.layer, each.head)}</button></th>
                  <td class="text"><i class={`mark ${FLAG[each.what]}`} aria-hidden="true">{texts.marks[each.what]}</i> {texts.flags[each.what]}</td>
                  <td>{shown(each.value)}</td><td>{round(each.limit)}</td><td>{before(each)}</td>
                </tr>
              ))}
            </tbody>
          </table>
        </div>
      )}
      {alarms.length > MOST_LINES && <p class="hint">{texts.table.more(alarms.length - MOST_LINES)}</p>}
    </section>
  );
}
