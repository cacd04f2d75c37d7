// Many buttons as one stop of the Tab key: arrows, Home and End go from one to the next.

import type { RefObject } from "preact";
import { useLayoutEffect } from "preact/hooks";

/** The handlers for the element around the buttons; `first` selects the one that Tab leads to until another has had the focus; without
 * `lines`, arrows up and down do something else. */
export function useRoving(frame: RefObject<HTMLElement | null>, selector: string, { first = "", lines = true } = {}) {
  const items = () => [...(frame.current?.querySelectorAll<HTMLElement>(selector) ?? [])];
  useLayoutEffect(() => { // after every render: buttons come and go
    const all = items();
    const stop = all.find((each) => each === document.activeElement) ?? all.find((each) => each.getAttribute("tabindex") === "0") ?? (first ? all.find((each) => each.matches(first)) : undefined) ?? all[0];
    settle(all, stop);
  });
  const onFocusIn = (event: Event) => {
    const all = items();
    const at = all.indexOf(event.target as HTMLElement);
    if (at >= 0) settle(all, all[at]);
  };
  const onKeyDown = (event: KeyboardEvent) => {
    if (event.shiftKey || event.ctrlKey || event.altKey || event.metaKey) return;
    const all = items();
    const at = all.indexOf(event.target as HTMLElement);
    if (at < 0) return;
    const to = { ArrowLeft: at - 1, ArrowRight: at + 1, Home: 0, End: all.length - 1, ...(lines ? { ArrowUp: above(all, at, -1), ArrowDown: above(all, at, 1) } : {}) }[event.key];
    if (to === undefined) return;
    event.preventDefault();
    event.stopPropagation();
    all[Math.max(0, Math.min(all.length - 1, to))].focus();
  };
  return { onFocusIn, onKeyDown };
}

function settle(all: HTMLElement[], stop: HTMLElement | undefined): void {
  for (const each of all) if (each.tabIndex !== (each === stop ? 0 : -1) || !each.hasAttribute("tabindex")) each.tabIndex = each === stop ? 0 : -1;
}

/** The nearest button of the line above or below. */
function above(all: HTMLElement[], at: number, sign: number): number {
  const from = all[at].getBoundingClientRect();
  let [best, distance, line] = [at, Infinity, NaN];
  for (let n = at + sign; n >= 0 && n < all.length; n += sign) {
    const to = all[n].getBoundingClientRect();
    if (Math.abs(to.top - from.top) < from.height / 2) continue;
    if (line === line && Math.abs(to.top - line) > 1) break;
    line = to.top;
    const across = Math.abs(to.left - from.left);
    if (across < distance) [best, distance] = [n, across];
  }
  return best;
}
