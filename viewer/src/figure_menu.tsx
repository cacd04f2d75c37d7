// The menu that saves or copies a view as a figure.

import { useLayoutEffect, useRef, useState } from "preact/hooks";
import { type Figure, type Kind, type Paper, pictured } from "./figure";
import { save } from "./map";
import { figures as texts } from "./texts";

const SIZE = [190, 240]; // pixels of the open menu, about
let onDark = false; // the last choice of the reader, for all figures

type Spot = { left: string; top: string } | { left: string; bottom: string };

/** Where the menu is on the screen: below its button, or above it where the window ends. */
function beside(button: HTMLElement): Spot {
  const box = button.getBoundingClientRect();
  const left = `${Math.max(4, Math.min(box.left, document.documentElement.clientWidth - SIZE[0] - 8))}px`;
  const below = box.bottom + SIZE[1] < innerHeight || box.top < SIZE[1];
  return below ? { left, top: `${box.bottom + 4}px` } : { left, bottom: `${innerHeight - box.top + 4}px` };
}

interface Props {
  of: string; // what the figure shows, for the name of the button
  make: (paper: Paper) => Figure | Promise<Figure>;
  busy?: string; // how far the drawing is
}

export function FigureMenu({ of, make, busy }: Props) {
  const [place, setPlace] = useState<Spot | null>(null); // null: closed
  const [dark, setDark] = useState(onDark);
  const [note, setNote] = useState("");
  const element = useRef<HTMLSpanElement>(null);
  const button = useRef<HTMLButtonElement>(null);
  const drawing = useRef(false);
  const close = () => setPlace(null);
  useLayoutEffect(() => {
    if (!place) return;
    const elsewhere = (event: Event) => element.current!.contains(event.target as Node) || close();
    const events = ["pointerdown", "focusin"];
    for (const each of events) addEventListener(each, elsewhere);
    const moved = () => setPlace(beside(button.current!));
    for (const each of ["scroll", "resize"]) addEventListener(each, moved, true);
    return () => {
      for (const each of events) removeEventListener(each, elsewhere);
      for (const each of ["scroll", "resize"]) removeEventListener(each, moved, true);
    };
  }, [place === null]);
  const toggle = () => {
    if (place) return close();
    setNote("");
    setDark(onDark);
    setPlace(beside(button.current!));
  };
  const pressed = (event: KeyboardEvent) => {
    if (!place) return;
    event.stopPropagation(); // arrows and Escape are the menu's
    if (event.key === "Escape") {
      close();
      button.current!.focus();
    }
  };
  const run = async (work: () => Promise<string>) => {
    if (drawing.current) return;
    drawing.current = true;
    close();
    button.current!.focus({ preventScroll: true }); // the chosen item is gone
    try {
      setNote(await work());
    } catch (error) {
      setNote(error instanceof Error ? error.message : String(error));
    }
    drawing.current = false;
  };
  const saved = (kind: Kind) => run(async () => {
    const { blob, name } = await pictured(kind, dark, make);
    save(name, blob);
    return texts.saved(name);
  });
  const copied = () => run(async () => {
    const blob = pictured("png3", dark, make).then((found) => found.blob);
    blob.catch(() => undefined); // reported by the line below
    await navigator.clipboard.write([new ClipboardItem({ "image/png": blob })]).catch(async (error: unknown) => {
      await blob; // why it could not be drawn, if that is the reason
      throw error instanceof DOMException ? new Error(texts.notCopied) : error;
    });
    return texts.copied;
  });
  const copies = typeof ClipboardItem !== "undefined" && !!navigator.clipboard?.write;
  return (
    <span class="figure-menu" ref={element} onKeyDown={pressed}>
      <button type="button" ref={button} aria-label={texts.of(of)} aria-expanded={place !== null} onClick={toggle}>
        {texts.figure} <span aria-hidden="true">▾</span>
      </button>
      {place && (
        <span class="choices" role="group" aria-label={texts.of(of)} style={place}>
          {(["png2", "png3", "svg"] as const).map((kind) => <button type="button" key={kind} title={texts.kindHelp[kind]} onClick={() => void saved(kind)}>{texts.kinds[kind]}</button>)}
          {copies && <button type="button" title={texts.copyHelp} onClick={() => void copied()}>{texts.copy}</button>}
          <label title={texts.darkHelp}><input type="checkbox" checked={dark} onChange={(event) => setDark((onDark = event.currentTarget.checked))} /> {texts.dark}</label>
        </span>
      )}
      <span role="status" class="hint">{busy || note}</span>
    </span>
  );
}
