// A line about the view that the address names and this page does not have.

import { useEffect, useState } from "preact/hooks";
import { type View, views } from "./state";
import { tabs } from "./texts";

/** The view of an address, if the page does not have it. */
function missingIn(hash: string): string | null {
  const parameters = new URLSearchParams(hash.replace(/^#/, ""));
  const view = parameters.get("view");
  return !view || ["change", ...views(parameters.get("against") ?? "")].includes(view) ? null : view;
}

function nameOf(view: string): string {
  const name = view === "label" ? undefined : (tabs as Record<string, unknown>)[view];
  return typeof name === "string" ? name : view;
}

export function MissingView({ view }: { view: View }) {
  const [missing, setMissing] = useState(() => missingIn(location.hash));
  useEffect(() => {
    const read = () => setMissing(missingIn(location.hash)); // with another view the address is that of what is shown
    read();
    addEventListener("hashchange", read);
    return () => removeEventListener("hashchange", read);
  }, [view]);
  return missing === null ? null : <p class="noted" role="status">{tabs.missing(nameOf(missing), nameOf(view))}</p>;
}
