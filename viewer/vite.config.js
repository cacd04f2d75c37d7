// One script and one style sheet, put where the package keeps what its pages are made of.
import { defineConfig } from "vite";

export default defineConfig({
  oxc: { jsx: { runtime: "automatic", importSource: "preact" } },
  define: { "process.env.NODE_ENV": '"production"' },
  build: {
    outDir: process.env.VIEWER_OUT ?? "../src/headscope/report",
    emptyOutDir: false,
    target: "es2022",
    lib: { entry: "src/main.tsx", formats: ["iife"], name: "headscope", fileName: () => "viewer.js", cssFileName: "viewer" },
  },
});
