// What a head does, beside its small map while that is pointed at or in focus.

import { useEffect, useLayoutEffect, useRef, useState } from "preact/hooks";
import { data, type Head, hasTokens, passing, queryAt, token } from "./data";
import { Likeness } from "./head";
import { connections } from "./largest";
import { figure, fill, headTip as texts, names, percent } from "./texts";
import { nameOf, pair, statistic } from "./words";

const AFTER = 250; // milliseconds under the pointer
const GAP = 8; // pixels beside the map
const NAME = "head-tip";

interface Shown {
  layer: number;
  head: number;
  at: HTMLElement;
  is: Head;
}

/** The small map under the pointer, once it rests there, or in focus by the keyboard; with the head decoded. */
function usePointed(): Shown | null {
  const [shown, setShown] = useState<Shown | null>(null);
  useEffect(() => {
    let [later, asked]: [number, HTMLElement | null] = [0, null];
    const hide = () => {
      clearTimeout(later);
      asked?.removeAttribute("aria-describedby");
      asked = null;
      setShown(null);
    };
    const show = async (at: HTMLElement) => {
      const [layer, head] = [Number(at.dataset.layer), Number(at.dataset.head)];
      const is = await passing(layer, head);
      if (asked !== at || !at.isConnected) return;
      at.setAttribute("aria-describedby", NAME);
      setShown({ layer, head, at, is });
    };
    const point = (event: Event, after: number) => {
      const at = (event.target as Element).closest?.<HTMLElement>(".thumb[data-layer]") ?? null;
      if (at === asked) return;
      hide();
      if (!at) return;
      asked = at;
      later = window.setTimeout(() => void show(at), after);
    };
    const over = (event: PointerEvent) => event.pointerType !== "touch" && point(event, AFTER);
    const focused = (event: Event) => (event.target as Element).matches?.(".thumb:focus-visible") && point(event, 0);
    const pressed = (event: KeyboardEvent) => event.key === "Escape" && hide();
    const events = { pointerover: over, focusin: focused, focusout: hide, pointerdown: hide, scroll: hide, keydown: pressed } as Record<string, (event: never) => void>;
    for (const [name, does] of Object.entries(events)) addEventListener(name, does as EventListener, { capture: name === "scroll" });
    document.documentElement.addEventListener("pointerleave", hide);
    return () => {
      hide();
      for (const [name, does] of Object.entries(events)) removeEventListener(name, does as EventListener, { capture: name === "scroll" });
      document.documentElement.removeEventListener("pointerleave", hide);
    };
  }, []);
  return shown;
}

export function HeadTip() {
  const shown = usePointed();
  const box = useRef<HTMLDivElement>(null);
  useLayoutEffect(() => {
    if (!shown) return;
    const [map, tip] = [shown.at.getBoundingClientRect(), box.current!.getBoundingClientRect()];
    const right = map.right + GAP + tip.width < innerWidth;
    box.current!.style.left = `${Math.max(GAP, right ? map.right + GAP : map.left - GAP - tip.width)}px`;
    box.current!.style.top = `${Math.max(GAP, Math.min(map.top, innerHeight - tip.height - GAP))}px`;
  }, [shown]);
  if (!shown) return null;
  const { layer, head, is } = shown;
  const keys = statistic(layer, head, "effective_keys");
  return (
    <div class="tip head-tip" role="tooltip" id={NAME} ref={box} inert>
      <b>{names.title(nameOf(layer, head))}</b>
      <Likeness {...{ layer, head }} />
      <Strongest {...{ layer, is }} />
      {keys !== null && <p>{texts.effective(figure(keys))}</p>}
    </div>
  );
}

/** The largest weight of a head. */
function Strongest({ layer: at, is }: { layer: number; is: Head }) {
  const layer = data.layers[at];
  const first = connections(is, layer).list[0];
  if (!first) return null;
  const { query, key, run, entry, p } = first;
  const alone = hasTokens(layer) && layer.runs === 1 && layer.of === layer.lengths![0];
  const tokens = alone ? [token(queryAt(layer, query)), token(key)] : [null, null];
  const found = tokens.includes(null) ? pair(layer, query, key, run, entry) : <>{tokens[0]} → {tokens[1]}</>;
  return <p>{fill(texts.strongest, { pair: <bdi>{found}</bdi>, weight: percent(p) })}</p>;
}
