// The screen: the width of an element, and the changes after which pictures are drawn again.

import type { RefObject } from "preact";
import { useEffect, useLayoutEffect, useState } from "preact/hooks";

const DARK = "(prefers-color-scheme: dark)";

/** A key that changes with the pixels of the screen, with the colours of the system, and with the window once it rests. */
export function useScreen(): string {
  const now = () => `${devicePixelRatio} ${matchMedia(DARK).matches} ${innerWidth}`;
  const [key, setKey] = useState(now);
  useEffect(() => {
    const changed = () => setKey(now());
    let later = 0;
    const resized = () => {
      clearTimeout(later);
      later = setTimeout(changed, 200);
    };
    const watched = [DARK, `(resolution: ${devicePixelRatio}dppx)`].map((query) => matchMedia(query));
    for (const each of watched) each.addEventListener("change", changed);
    addEventListener("resize", resized);
    return () => {
      clearTimeout(later);
      for (const each of watched) each.removeEventListener("change", changed);
      removeEventListener("resize", resized);
    };
  }, [key]);
  return key;
}

/** The width of an element in whole pixels. A change is applied in the next frame: drawing may change the
 * element's height, which is not allowed inside a callback of ResizeObserver. */
export function useWidth(element: RefObject<HTMLElement | null>): number {
  const [width, setWidth] = useState(0);
  useLayoutEffect(() => {
    const measure = () => setWidth(Math.floor(element.current!.getBoundingClientRect().width));
    let frame = 0;
    const watcher = new ResizeObserver(() => {
      cancelAnimationFrame(frame);
      frame = requestAnimationFrame(measure);
    });
    watcher.observe(element.current!);
    measure();
    return () => {
      cancelAnimationFrame(frame);
      watcher.disconnect();
    };
  }, []);
  return width;
}

/** Marks an element that has more below its lower edge with data-more, so that a shade there shows it: many systems hide scrollbars. */
export function useMore(element: RefObject<HTMLElement | null>): void {
  useLayoutEffect(() => {
    const box = element.current!;
    const mark = () => {
      const more = box.scrollHeight - box.clientHeight - box.scrollTop > 2;
      if (more !== "more" in box.dataset) more ? (box.dataset.more = "") : delete box.dataset.more;
    };
    let frame = 0;
    const watcher = new ResizeObserver(() => {
      cancelAnimationFrame(frame);
      frame = requestAnimationFrame(mark);
    });
    const content = new MutationObserver(() => { // what is in it comes later, and changes
      for (const each of box.children) watcher.observe(each);
      mark();
    });
    watcher.observe(box);
    content.observe(box, { childList: true });
    for (const each of box.children) watcher.observe(each);
    box.addEventListener("scroll", mark, { passive: true });
    mark();
    return () => {
      cancelAnimationFrame(frame);
      watcher.disconnect();
      content.disconnect();
      box.removeEventListener("scroll", mark);
    };
  }, []);
}

const LEAST = 320; // pixels of a map's height
const BELOW = 44; // pixels for the buttons under a map

/** The height of the window for a map inside of an element, with its buttons, in whole pixels. An element that starts far down is scrolled
 * to: then it is the height of the window below the bar. */
export function useRoom(element: RefObject<HTMLElement | null>): number {
  const [room, setRoom] = useState(0);
  useLayoutEffect(() => {
    const measure = () => {
      const map = element.current?.querySelector(".map");
      if (!map) return;
      const bar = document.querySelector(".topbar")?.clientHeight ?? 0;
      const top = map.getBoundingClientRect().top + scrollY;
      const beginning = top < innerHeight / 2 ? top : bar + map.getBoundingClientRect().top - element.current!.getBoundingClientRect().top;
      setRoom(Math.max(LEAST, Math.floor(innerHeight - beginning - BELOW)));
    };
    measure();
    addEventListener("resize", measure);
    return () => removeEventListener("resize", measure);
  });
  return room;
}

/** Whether the page is dark, by the theme that the reader chose or else by the system. */
export function isDark(theme: string): boolean {
  return theme ? theme === "dark" : matchMedia(DARK).matches;
}
