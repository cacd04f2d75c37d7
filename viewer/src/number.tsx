// A field for a number.

import { useLayoutEffect, useRef, useState } from "preact/hooks";

interface Props {
  label?: string;
  value: number | null; // null: the field is empty
  set: (to: number) => void;
  clear?: () => void; // called when the field is emptied
  min?: number;
  max?: number;
  step?: "any"; // without it, only whole numbers
}

/** While the reader types, the field shows what is typed, such as "0."; Enter or leaving the field shows its value. */
export function NumberField({ label, value, set, clear, min, max, step }: Props) {
  const field = useRef<HTMLInputElement>(null);
  const [typing, setTyping] = useState(false);
  useLayoutEffect(() => {
    if (!typing) field.current!.value = String(value ?? "");
  }, [typing, value]);
  const typed = () => {
    setTyping(true);
    const to = field.current!.valueAsNumber;
    if (!field.current!.value && !field.current!.validity.badInput) clear?.();
    if (step ? Number.isFinite(to) : Number.isInteger(to)) set(to);
  };
  const ended = () => setTyping(false);
  return <input ref={field} type="number" aria-label={label} {...{ min, max, step }} onInput={typed} onChange={ended} onBlur={ended} />;
}
