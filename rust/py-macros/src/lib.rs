//! `#[guarded]`: what Python calls does not panic.

use proc_macro::TokenStream;
use quote::quote;
use syn::{Block, Error, ImplItem, Item, ReturnType, Type, parse_macro_input, parse_quote};

/// Turns a panic into an `InternalError`, in a `#[pyfunction]` or in all functions of a
/// `#[pymethods]` block. It stands before either. A function without a `PyResult` gets one.
#[proc_macro_attribute]
pub fn guarded(_: TokenStream, item: TokenStream) -> TokenStream {
    let mut item = parse_macro_input!(item as Item);
    match &mut item {
        Item::Fn(function) => guard(&mut function.sig.output, &mut function.block),
        Item::Impl(block) => {
            for item in &mut block.items {
                if let ImplItem::Fn(function) = item {
                    guard(&mut function.sig.output, &mut function.block);
                }
            }
        }
        other => {
            let error = Error::new_spanned(other, "a function, or a block of methods");
            return error.into_compile_error().into();
        }
    }
    quote!(#item).into()
}

fn guard(output: &mut ReturnType, block: &mut Block) {
    let returned: Type = match output {
        ReturnType::Default => parse_quote!(()),
        ReturnType::Type(_, returned) => (**returned).clone(),
    };
    if is_result(&returned) {
        *block = parse_quote!({ crate::panics::catch(move || #block) });
    } else {
        *output = parse_quote!(-> ::pyo3::PyResult<#returned>);
        *block = parse_quote!({ crate::panics::catch(move || ::std::result::Result::Ok(#block)) });
    }
}

fn is_result(returned: &Type) -> bool {
    let Type::Path(path) = returned else {
        return false;
    };
    path.path.segments.last().is_some_and(|last| last.ident == "PyResult")
}
