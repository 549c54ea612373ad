// Declarations of Node's modules, which replace a package of types.
declare module "node:assert/strict";
declare module "node:buffer";
declare module "node:test";
declare module "node:zlib";
