// The scale of colours.

import { type Colours, colour, type Signed } from "./field";

/** A bar of all colours between the least and the largest value. */
export function Bar({ what, low, high, colours, signed }: { what: string; low: string; high: string; colours: Colours; signed?: Signed }) {
  const steps = Array.from({ length: 24 }, (_, n) => colour(n / 23, colours, signed).fill);
  return (
    <>
      <span>{what}</span>
      <span>{low}</span>
      <i class="bar" style={{ background: `linear-gradient(90deg, ${steps.join(", ")})` }} />
      <span>{high}</span>
    </>
  );
}
