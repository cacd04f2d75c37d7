declare module "*.css";
declare const __SOURCE__: string;
