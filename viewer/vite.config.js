// One script and one style sheet, put where the package keeps what its pages are made of.
import { createHash } from "node:crypto";
import { readdirSync, readFileSync } from "node:fs";
import { defineConfig } from "vite";

// Of all that the script is made from; it stands in the script, so that a test without node can tell one that is older.
const source = createHash("sha256");
for (const name of ["package-lock.json", "vite.config.js", ...readdirSync("src").sort().map((each) => `src/${each}`)]) {
  source.update(`${name}\n`).update(readFileSync(name));
}

export default defineConfig({
  oxc: { jsx: { runtime: "automatic", importSource: "preact" } },
  define: { "process.env.NODE_ENV": '"production"', __SOURCE__: JSON.stringify(source.digest("hex")) },
  build: {
    outDir: process.env.VIEWER_OUT ?? "../src/headscope/report",
    emptyOutDir: false,
    target: "es2022",
    lib: { entry: "src/main.tsx", formats: ["iife"], name: "headscope", fileName: () => "viewer.js", cssFileName: "viewer" },
  },
});
