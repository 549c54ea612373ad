// Node's own modules, whose types would be one more package.
declare module "node:assert/strict";
declare module "node:buffer";
declare module "node:test";
declare module "node:zlib";
