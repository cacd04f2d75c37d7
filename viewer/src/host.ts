// A notebook that shows the page in a frame: what is in view goes to it, and it can open a head.

import { useEffect } from "preact/hooks";
import { data } from "./data";
import { opened } from "./head";
import type { State } from "./state";

const hosted = parent !== window;

interface Message {
  headscope?: unknown;
  layer?: unknown;
  head?: unknown;
}

/** Whether these are the numbers of a head of this page. */
function isHead(layer: unknown, head: unknown): boolean {
  return Number.isInteger(layer) && Number.isInteger(head) && (head as number) >= 0 && (head as number) < (data.layers[layer as number]?.heads ?? 0);
}

export function useHost(state: State, change: (part: Partial<State>) => void): void {
  useEffect(() => {
    if (!hosted) return;
    const received = (event: MessageEvent<Message | null>) => {
      if (event.source !== parent || typeof event.data !== "object" || event.data === null) return;
      const { headscope, layer, head } = event.data;
      if (headscope === "open" && isHead(layer, head)) change({ view: "head", ...opened(state, layer as number, head as number) });
    };
    addEventListener("message", received);
    return () => removeEventListener("message", received);
  }, [state, change]);
  const { view, layer, head, row, column, zoom } = state;
  useEffect(() => {
    if (hosted) parent.postMessage({ headscope: "state", view, layer, head, row, column, zoom }, "*"); // nothing secret: its own numbers
  }, [view, layer, head, row, column, zoom]);
}
