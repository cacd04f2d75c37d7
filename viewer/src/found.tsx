// The summary: what follows from the statistics, as tables.

import { data } from "./data";

export function Found() {
  return (
    <>
      {data.tables.map(({ title, says, columns, words, cells, caption }, n) => (
        <section key={n} aria-labelledby={`found-${n}`}>
          <h2 id={`found-${n}`}>{title}</h2>
          <p class="hint">{says}</p>
          {cells.length > 0 && (
            <div class="scroll" tabIndex={0} role="group" aria-labelledby={`found-${n}`}>
              <table>
                <thead><tr>{columns.map((column, at) => <th scope="col" key={column} class={words[at] ? "text" : ""}>{column}</th>)}</tr></thead>
                <tbody>
                  {cells.map((line, row) => (
                    <tr key={row}>{line.map((cell, at) => <td key={at} class={words[at] ? "text" : ""}>{cell}</td>)}</tr>
                  ))}
                </tbody>
              </table>
            </div>
          )}
          {caption && <p class="hint">{caption}</p>}
        </section>
      ))}
    </>
  );
}
