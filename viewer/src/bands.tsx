// The colours of segments: bands along the axes of a map, and their legend.

import { data, type Layer } from "./data";
import { segments as texts } from "./texts";

const COLOURS = 8; // --segment-0 to --segment-7; further segments begin again

/** Whether the segments of a layer's keys are known, position by position. */
export function hasBands(layer: Layer): boolean {
  return !!layer.segments && layer.segments.spans.length > 0 && layer.lengths !== null && !!layer.map?.ranges && layer.kind === "self" && data.image === null;
}

/** The colours of the page, now: they change with the theme. */
export function segmentInks(): string[] {
  const style = getComputedStyle(document.documentElement);
  return Array.from({ length: COLOURS }, (_, n) => style.getPropertyValue(`--segment-${n}`).trim());
}

export function Swatch({ segment }: { segment: number }) {
  return <i class="segment-swatch" aria-hidden="true" style={{ background: `var(--segment-${segment % COLOURS})` }} />;
}

/** The names of the segments, with the colours of their bands. */
export function BandLegend({ layer }: { layer: Layer }) {
  if (!hasBands(layer)) return null;
  return (
    <p class="hint band-legend">{texts.bands} {layer.segments!.names.map((name, n) => <span key={n}><Swatch segment={n} /> <bdi>{name}</bdi></span>)}</p>
  );
}
