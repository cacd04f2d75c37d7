// The heads of a layer as small maps in a row, above the large one.

import { useLayoutEffect, useRef } from "preact/hooks";
import { data } from "./data";
import { Thumb } from "./grid";
import type { State } from "./state";
import { headTip as texts } from "./texts";
import { layerName } from "./words";

/** `open` shows another head of the layer. */
export function LayerStrip({ state, theme, open }: { state: State; theme: string; open: (head: number) => void }) {
  const frame = useRef<HTMLDivElement>(null);
  const { layer, head } = state;
  useLayoutEffect(() => {
    const [strip, current] = [frame.current!, frame.current!.querySelector<HTMLElement>(".opened")];
    if (!current) return;
    if (strip.contains(document.activeElement)) current.focus(); // arrows step to another head: the focus goes with it
    const [box, at] = [strip.getBoundingClientRect(), current.getBoundingClientRect()];
    if (at.left < box.left || at.right > box.right) strip.scrollLeft += at.left - box.left - (box.width - at.width) / 2;
  }, [layer, head]);
  const heads = Array.from({ length: data.layers[layer].heads }, (_, n) => n);
  return (
    <div class="layer-strip" role="group" aria-label={texts.strip(layerName(layer))} ref={frame}>
      {heads.map((n) => <Thumb key={n} place={{ layer, head: n }} state={{ ...state, sort: "" }} theme={theme} open={(place) => open(place.head)} stop={n === head} />)}
    </div>
  );
}
