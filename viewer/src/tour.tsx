// The tour: a few steps, each with a frame around a part of the page and a sentence beside it.

import { useCallback, useEffect, useLayoutEffect, useRef, useState } from "preact/hooks";
import { data, HAS_READING } from "./data";
import { HAS_WINDOWS } from "./words";
import { other } from "./other";
import type { State } from "./state";
import { tour as texts } from "./texts";

type Name = keyof typeof texts.steps;

interface Stop {
  name: Name;
  at: string;
  view: State["view"];
}

const HISTORY: Stop[] = [
  { name: "happened", at: ".happened ul", view: "history" },
  { name: "steps", at: ".history-map", view: "history" },
  { name: "slider", at: ".history-slider", view: "history" },
  { name: "step", at: ".history-side", view: "history" },
  { name: "findStep", at: ".search input", view: "history" },
];
const CHANGES: Stop = { name: "changes", at: ".changes", view: "changes" };
const STEPS: Stop[] = [
  { name: "cards", at: ".cards ul", view: "heads" },
  { name: "grid", at: ".grid", view: "heads" },
  ...(data.image ? [{ name: "pictures", at: ".pictures, .drawing", view: "head" } as const] : [{ name: "map", at: ".drawing", view: "head" } as const]),
  { name: "beside", at: ".beside", view: "head" },
  { name: "reading", at: ".reading-text", view: "reading" },
  { name: "find", at: ".search input", view: "heads" },
];
const GAP = 12; // pixels between the frame and the sentence

let start: () => void = () => undefined;

export function startTour(): void {
  start();
}

interface Props {
  state: State;
  change: (part: Partial<State>) => void;
}

interface Box {
  left: number;
  top: number;
  width: number;
  height: number;
}

export function Tour({ state, change }: Props) {
  const [at, setAt] = useState<number | null>(null);
  const before = useRef(state); // where the reader was
  const steps = data.history ? HISTORY : [...(other() ? [CHANGES] : []), ...STEPS.filter(({ name }) => name !== "reading" || HAS_READING || HAS_WINDOWS)];
  const show = (to: number) => {
    change({ view: steps[to].view, ...(steps[to].name === "cards" ? { cards: true } : {}) });
    setAt(to);
  };
  start = () => {
    before.current = state;
    show(0);
  };
  const leave = () => {
    setAt(null);
    change(before.current);
    document.querySelector<HTMLElement>(".menu.help > button")?.focus();
  };
  if (at === null) return null;
  return <Step key={at} selector={steps[at].at} text={texts.steps[steps[at].name]} of={steps.length} {...{ at, show, leave, ready: state.view === steps[at].view }} />;
}

interface StepProps {
  selector: string;
  text: string;
  at: number;
  of: number;
  ready: boolean;
  show: (to: number) => void;
  leave: () => void;
}

function Step({ selector, text, at, of, ready, show, leave }: StepProps) {
  const box = useRef<HTMLDivElement>(null);
  const next = useRef<HTMLButtonElement>(null);
  const [places, setPlaces] = useState<{ frame: Box; left: number; top: number } | null>(null);
  const place = useCallback(() => {
    const target = document.querySelector<HTMLElement>(selector);
    if (target && box.current) setPlaces(placed(target.getBoundingClientRect(), box.current));
  }, [selector]);
  useLayoutEffect(() => next.current!.focus({ preventScroll: true }), []);
  useEffect(() => {
    if (!ready) return;
    let tries = 0;
    const begin = () => { // heads are decoded first: what the step shows may come later
      const target = document.querySelector<HTMLElement>(selector);
      if (!target) return void (tries++ < 40 ? (later = setTimeout(begin, 50)) : show(at + 1 < of ? at + 1 : 0));
      const bar = document.querySelector(".topbar")!.clientHeight;
      if (getComputedStyle(target).position !== "fixed" && !target.closest(".topbar")) scrollTo({ top: Math.max(0, target.getBoundingClientRect().top + scrollY - bar - GAP), behavior: "instant" });
      place();
      watcher.observe(target);
    };
    let later = setTimeout(begin, 0);
    const watcher = new ResizeObserver(() => requestAnimationFrame(place));
    for (const each of ["scroll", "resize"]) addEventListener(each, place);
    return () => {
      clearTimeout(later);
      watcher.disconnect();
      for (const each of ["scroll", "resize"]) removeEventListener(each, place);
    };
  }, [ready]);
  useEffect(() => { // wherever the focus is
    const escaped = (event: KeyboardEvent) => {
      if (event.key !== "Escape") return;
      event.stopPropagation();
      leave();
    };
    addEventListener("keydown", escaped, true);
    return () => removeEventListener("keydown", escaped, true);
  });
  const pressed = (event: KeyboardEvent) => {
    event.stopPropagation();
    if (event.key === "ArrowRight" && at + 1 < of) show(at + 1);
    else if (event.key === "ArrowLeft" && at > 0) show(at - 1);
  };
  const frame = places?.frame;
  return (
    <>
      {frame && <div class="tour-frame" aria-hidden="true" style={{ left: `${frame.left}px`, top: `${frame.top}px`, width: `${frame.width}px`, height: `${frame.height}px` }} />}
      <div class="tour" role="dialog" aria-label={texts.label} aria-describedby="tour-text" ref={box} onKeyDown={pressed} style={places ? { left: `${places.left}px`, top: `${places.top}px` } : { visibility: "visible" }}>
        <p id="tour-text">{text}</p>
        <p class="steps">
          <span>{texts.step(at + 1, of)}</span>
          {at + 1 < of && <button type="button" onClick={leave}>{texts.leave}</button>}
          {at > 0 && <button type="button" onClick={() => show(at - 1)}>{texts.back}</button>}
          <button type="button" class="next" ref={next} onClick={() => (at + 1 < of ? show(at + 1) : leave())}>{at + 1 < of ? texts.next : texts.done}</button>
        </p>
      </div>
    </>
  );
}

/** Where the sentence stands: below, above, right or left of its target; where nothing is free, at the lower end of the window, and the
 * frame ends above it. */
function placed(target: DOMRect, box: HTMLElement): { frame: Box; left: number; top: number } {
  const [wide, high] = [document.documentElement.clientWidth, innerHeight];
  const { offsetWidth: width, offsetHeight: height } = box;
  const bottom = document.querySelector<HTMLElement>(".inview") && matchMedia("(max-width: 34rem)").matches ? 52 : 0; // the steps of a phone
  const [left, right] = [Math.max(2, target.left), Math.min(wide - 2, target.right)];
  const [top, below] = [Math.max(2, target.top), Math.min(high - 2 - bottom, target.bottom)];
  const frame = { left: left - 2, top: top - 2, width: Math.max(0, right - left) + 4, height: Math.max(0, below - top) + 4 };
  const across = Math.max(8, Math.min(wide - width - 8, left));
  const down = Math.max(52, Math.min(high - height - 8 - bottom, top));
  if (below + GAP + height + 8 + bottom <= high) return { frame, left: across, top: below + GAP };
  if (top - GAP - height >= 52) return { frame, left: across, top: top - GAP - height };
  if (right + GAP + width + 8 <= wide) return { frame, left: right + GAP, top: down };
  if (left - GAP - width >= 8) return { frame, left: left - GAP - width, top: down };
  const at = high - height - 8 - bottom;
  return { frame: { ...frame, height: Math.max(0, at - GAP - frame.top) }, left: Math.max(8, (wide - width) / 2), top: at };
}
