// Which small picture is drawn next: those near the window in their order, a few at a time, then the others while the page is idle. A page may
// have a thousand heads in sight: if all were read at once, the first picture would wait for the last one.

import { isReading } from "./other";

type Draw = () => Promise<(() => void) | undefined>; // reads the head, and returns what shows its picture

interface Waiting {
  near: Draw;
  later: Draw;
}

const AT_ONCE = 4; // heads that are read at a time, so that the browser inflates one while another one is drawn
const PAUSE = 100; // ms between pictures that appear
const waiting = new Map<Element, Waiting>(); // that are not drawn yet
const near = new Set<Element>();
let workers = 0;
let isDrawing = false;

let watcher: IntersectionObserver | null = null; // one for all: thousands of them slow down each frame

function watch(element: Element): void {
  watcher ??= new IntersectionObserver((entries) => {
    for (const { target, isIntersecting } of entries) isIntersecting ? near.add(target) : near.delete(target);
    while (workers < Math.min(AT_ONCE, near.size)) void drawNear();
  }, { rootMargin: "200px" });
  watcher.observe(element);
}

/** Draws an element once it is near the window, or the page is idle; the function that is returned ends its waiting. */
export function drawWhenNear(element: Element, draw: Waiting): () => void {
  waiting.set(element, draw);
  watch(element);
  void drawRest();
  return () => taken(element);
}

/** What is to be drawn for an element, which then no longer waits. */
function taken(element: Element): Waiting | undefined {
  const found = waiting.get(element);
  waiting.delete(element);
  near.delete(element);
  watcher!.unobserve(element);
  return found;
}

/** A head that cannot be read does not hold up the others. */
async function attempted(draw: Draw | undefined): Promise<void> {
  try {
    const show = await draw?.();
    if (show) showSoon(show);
  } catch (error) {
    reportError(error);
  }
}

const ready: (() => void)[] = [];
let isPlanned = false;
let shown = -Infinity;

/** Pictures appear several at a time: with a thousand heads in sight a frame takes 20 ms, whatever changed. */
function showSoon(show: () => void): void {
  ready.push(show);
  if (isPlanned) return;
  isPlanned = true;
  setTimeout(() => {
    isPlanned = false;
    shown = performance.now();
    for (const each of ready.splice(0)) each();
  }, Math.max(0, shown + PAUSE - performance.now()));
}

async function drawNear(): Promise<void> {
  workers++;
  for (const element of near) await attempted(taken(element)?.near);
  workers--;
}

/** Draws those that nobody scrolled to, one after the other. */
async function drawRest(): Promise<void> {
  if (isDrawing) return;
  isDrawing = true;
  let until = 0; // of a time with nothing else to do
  for (const element of waiting.keys()) {
    while (isReading() || workers > 0) await new Promise((done) => setTimeout(done, workers > 0 ? 20 : 200)); // what is in sight, or a file that is compared, comes first
    if (performance.now() > until) {
      await new Promise<unknown>((done) => (window.requestIdleCallback ?? setTimeout)(done)); // Safari has none
      until = performance.now() + 30;
    }
    await attempted(taken(element)?.later);
  }
  isDrawing = false;
}
